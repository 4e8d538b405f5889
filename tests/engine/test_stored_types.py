"""Weights stored in another floating-point type: the values count, not their width."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from coli_server.engine import Engine
from coli_server.errors import ModelError
from coli_server.experts import CheckpointIndex

MODELS = Path(__file__).parents[1] / "data" / "models"
F32 = NDArray[np.float32]


def rewritten(name: str, folder: Path, convert: Callable[[str, F32], NDArray[np.generic]]) -> Path:
    """A copy of the checkpoint `name` whose tensors are those that `convert` makes of name and values."""
    index = CheckpointIndex.open(MODELS / name)
    folder.mkdir()
    shutil.copy(MODELS / name / "config.json", folder)
    save_file({key: convert(key, index.read_f32(key)) for key in index}, folder / "model.safetensors")
    return folder


def logits(folder: Path, name: str) -> F32:
    engine = Engine.open(folder, warm=False, threads=1)
    try:
        return engine.logits(np.load(MODELS / name / "expected.npz")["ids_1"].tolist())
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "qwen2_moe", "phimoe", "glm4_moe", "olmoe"])
def test_float32_copies_of_bfloat16_weights_change_no_bit(name: str, tmp_path: Path) -> None:
    wide = rewritten(name, tmp_path / "wide", lambda _, values: values)
    np.testing.assert_array_equal(logits(wide, name), logits(MODELS / name, name))


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "qwen3_moe"])
def test_float16_weights_are_close(name: str, tmp_path: Path) -> None:
    half = rewritten(name, tmp_path / "half", lambda _, values: values.astype(np.float16))
    np.testing.assert_allclose(logits(half, name), logits(MODELS / name, name), atol=0.05)


def test_resident_parts_may_be_stored_in_several_types(tmp_path: Path) -> None:
    def convert(key: str, values: F32) -> NDArray[np.generic]:
        return values if "q_proj" in key or "experts" in key else values.astype(np.float16)

    mixed = rewritten("mixtral", tmp_path / "mixed", convert)
    np.testing.assert_allclose(logits(mixed, "mixtral"), logits(MODELS / "mixtral", "mixtral"), atol=0.05)


def test_experts_of_a_layer_in_several_types_are_refused(tmp_path: Path) -> None:
    mixed = rewritten(
        "mixtral", tmp_path / "mixed", lambda key, v: v.astype(np.float16) if "experts.3.w1" in key else v
    )
    with pytest.raises(ModelError, match="layer 0 are stored in several types"):
        Engine.open(mixed, warm=False)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    coded = rewritten(
        "mixtral", tmp_path / "int8", lambda key, v: v.astype(np.int8) if "experts.3.w1" in key else v
    )
    with pytest.raises(ModelError, match=r"experts\.3\.w1\.weight.*I8"):
        Engine.open(coded, warm=False)


def test_an_8_bit_float_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    coded = rewritten("qwen3_moe", tmp_path / "fp8", lambda _, values: values)
    file = coded / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    entry = header["model.layers.0.mlp.experts.0.gate_proj.weight"]
    entry["dtype"], entry["shape"] = "F8_E4M3", [entry["shape"][0], 4 * entry["shape"][1]]
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj\.weight"):
        Engine.open(coded, warm=False)
