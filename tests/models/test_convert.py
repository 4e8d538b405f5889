"""Converted folders: the same model in another form, one read an expert, resumable, checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.cli import main
from coli_server.engine import Engine
from coli_server.engine.kernels import Kind
from coli_server.engine.model import Checkpoint
from coli_server.errors import ColiError, ConfigurationError, ModelError
from coli_server.experts import CheckpointIndex, ExpertCache
from coli_server.experts.layout import plan_reads
from coli_server.models import convert as module
from coli_server.models.convert import Conversion, convert

MODELS = Path(__file__).parents[1] / "data" / "models"
FAMILIES = sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))
PLAIN = MODELS / "glm4_moe"
PROMPT = list(range(2, 42))


def logits_of(folder: Path, ids: list[int] = PROMPT) -> np.ndarray[Any, np.dtype[np.float32]]:
    engine = Engine.open(folder)
    try:
        return engine.logits(ids)
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_are_the_same_model_in_every_family(family: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(MODELS / family, out, Conversion(16))
    np.testing.assert_array_equal(logits_of(out), logits_of(MODELS / family))


@pytest.mark.parametrize("family", [name for name in FAMILIES if "-" not in name])
@pytest.mark.parametrize(("bits", "least"), [(8, 0.995), (4, 0.95)])
def test_eight_and_four_bits_stay_near_the_original(
    family: str, bits: int, least: float, tmp_path: Path
) -> None:
    """By the angle between logits at the median token: at others a router of random weights tips over."""
    out = tmp_path / "out"
    convert(MODELS / family, out, Conversion(bits))
    original, converted = logits_of(MODELS / family), logits_of(out)
    lengths = np.linalg.norm(original, axis=1) * np.linalg.norm(converted, axis=1)
    assert np.median((original * converted).sum(axis=1) / lengths) > least


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_an_expert_is_one_read_of_whole_pages(bits: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(PLAIN, out, Conversion(bits))
    for experts in Checkpoint.open(out).experts:
        for source in experts.files.sources:
            (read,) = plan_reads(experts.files.layout, source)
            assert read.offset % 4096 == 0
            assert sum(segment.nbytes for segment in read.segments) % 4096 == 0


def test_the_section_says_what_was_done_and_everything_else_is_carried(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(PLAIN, out, Conversion(4, group=64))
    config = json.loads((out / "config.json").read_text())
    assert config.pop("coli_weights") == {"version": 1, "experts": "I4_64", "dense": "I8_64"}
    assert config == json.loads((PLAIN / "config.json").read_text())
    assert (out / "tokenizer.json").read_bytes() == (PLAIN / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    assert not list(out.glob("convert.json*"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version=2"),
        ({"experts": "I4_48"}, "experts="),
        ({"experts": None}, "experts is missing"),
        ({"dense": "BF16"}, "dense="),
        ({"zero_points": True}, "zero_points"),
        ({"experts": "I8_32"}, "shape"),
        ({"dense": "I8_128"}, "shape"),
    ],
)
def test_a_malformed_section_is_refused_by_name(
    change: dict[str, object], named: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(PLAIN, out, Conversion(4))
    config = json.loads((out / "config.json").read_text())
    config["coli_weights"] |= change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named):
        Checkpoint.open(out)


def test_a_converted_folder_without_its_section_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(PLAIN, out, Conversion(8))
    (out / "config.json").write_bytes((PLAIN / "config.json").read_bytes())
    with pytest.raises(ModelError, match="experts"):
        Checkpoint.open(out)


def test_a_broken_off_conversion_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write: Callable[..., str] = module._write_shard

    def breaking(file: Path, shard: Any) -> str:
        if len(written) == 1 and not (tmp_path / "again").exists():
            raise OSError("no space left")
        written.append(file.name)
        return write(file, shard)

    monkeypatch.setattr(module, "_write_shard", breaking)
    out = tmp_path / "out"
    with pytest.raises(OSError, match="space"):
        convert(PLAIN, out, Conversion(8))
    assert not out.exists()
    (tmp_path / "again").touch()
    convert(PLAIN, out, Conversion(8))
    assert len(written) == len(set(written)), "a shard was written twice"
    whole = tmp_path / "whole"
    convert(PLAIN, whole, Conversion(8))
    assert [file.read_bytes() for file in sorted(out.iterdir())] == [
        file.read_bytes() for file in sorted(whole.iterdir())
    ]


def test_what_another_conversion_has_left_is_not_used(tmp_path: Path) -> None:
    out, part = tmp_path / "out", tmp_path / "out.partial"
    part.mkdir()
    (part / "convert.json").write_text(
        '{"fingerprint": "other", "digests": {"model-dense.safetensors": "0"}}'
    )
    (part / "model-dense.safetensors").write_bytes(b"left over")
    convert(PLAIN, out, Conversion(8))
    assert len(CheckpointIndex.open(out)) > 0


def test_a_shard_that_the_disk_gives_back_differently_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Callable[..., str] = module._write_shard

    def damaging(file: Path, shard: Any) -> str:
        digest = write(file, shard)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return digest

    monkeypatch.setattr(module, "_write_shard", damaging)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="read back differently"):
        convert(PLAIN, out, Conversion(8))
    assert not out.exists()


def test_memory_is_that_of_a_few_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[int] = []

    def counting(layers: Any, slots_per_layer: int, **options: Any) -> Any:
        slots.append(slots_per_layer)
        return ExpertCache(layers, slots_per_layer, **options)

    monkeypatch.setattr(module, "ExpertCache", counting)
    convert(PLAIN, tmp_path / "out", Conversion(8))
    assert slots == [2] * len(Checkpoint.open(PLAIN).experts)


def test_progress_covers_the_whole_source(tmp_path: Path) -> None:
    seen: list[int] = []

    @contextmanager
    def bar(total: int) -> Any:
        seen.append(-total)
        yield seen.append

    convert(PLAIN, tmp_path / "out", Conversion(16), bar)
    assert sum(seen) == 0


def test_refusals_name_the_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(PLAIN), str(out), "--bits", "5"]) == 2
    assert "--bits=5 is not supported (accepted: 16, 8, 4)" in capsys.readouterr().err
    for wrong in ({"bits": 8, "group": 48}, {"bits": 4, "dense_bits": 4}):
        with pytest.raises(ConfigurationError, match="accepted"):
            Conversion(**wrong)
    assert main(["convert", str(PLAIN), str(out), "--bits", "8"]) == 0
    with pytest.raises(ConfigurationError, match="exists already"):
        convert(PLAIN, out, Conversion(8))
    with pytest.raises(ColiError, match="converted already"):
        convert(out, tmp_path / "twice", Conversion(4))


def test_experts_of_sixteen_bits_keep_their_type() -> None:
    assert Conversion(16).form(Kind.F16).experts == Kind.F16
    assert Conversion(16).form(Kind.F32).experts == Kind.BF16
