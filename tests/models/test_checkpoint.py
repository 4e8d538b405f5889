import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from coli_server.engine import Engine
from coli_server.errors import ModelError
from coli_server.models.checkpoint import ALIGNMENT, write_model
from coli_server.models.dense import bfloat16_bits, bfloat16_values, read_gguf

Stored = Callable[[Path], dict[str, Any]]


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, read_gguf(tiny.gguf), tiny.recipe, lambda: None)
    return folder


def _feed_forward(x: Any, tensors: dict[str, Any], owner: str) -> Any:
    gate, up, down = (
        tensors[f"{owner}.{name}_proj.weight"].astype(np.float64) for name in ("gate", "up", "down")
    )
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.fixture
def neutral(tiny: Any, tmp_path: Path) -> Path:
    """The same carving with every expert active at weight 1."""
    folder = tmp_path / "neutral"
    folder.mkdir()
    write_model(folder, read_gguf(tiny.gguf), tiny.recipe.neutral(), lambda: None)
    return folder


def test_all_experts_of_a_neutral_recipe_are_the_dense_feed_forward(
    neutral: Path, tiny: Any, stored_tensors: Stored, dense_reference: Callable[[Path], Any]
) -> None:
    tensors, weights = stored_tensors(neutral), dense_reference(tiny.gguf).weights
    x = np.random.default_rng(3).standard_normal((5, 64))
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        owners = [f"{mlp}.shared_experts"] + [f"{mlp}.experts.{e}" for e in range(6)]
        carved = sum(_feed_forward(x, tensors, owner) for owner in owners)
        dense = {
            f"dense.{name}_proj.weight": weights[f"blk.{layer}.ffn_{name}.weight"]
            for name in ("gate", "up", "down")
        }
        np.testing.assert_allclose(carved, _feed_forward(x, dense, "dense"), atol=1e-12)


def test_a_scale_is_in_the_down_projection_before_it_is_rounded(
    folder: Path, tiny: Any, stored_tensors: Stored
) -> None:
    tensors, recipe, dense = stored_tensors(folder), tiny.recipe, read_gguf(tiny.gguf)
    for layer in range(recipe.layers):
        down = dense.tensor(f"model.layers.{layer}.mlp.down_proj.weight")
        shared = down[:, recipe.shared_neurons(layer)] * recipe.scale[layer, 0][:, None].astype(np.float32)
        expected = {"shared_experts": shared}
        for expert in range(recipe.experts):
            scale = recipe.scale[layer, 1 + expert][:, None].astype(np.float32)
            expected[f"experts.{expert}"] = down[:, recipe.expert_neurons(layer, expert)] * scale
        for owner, values in expected.items():
            stored = tensors[f"model.layers.{layer}.mlp.{owner}.down_proj.weight"]
            np.testing.assert_array_equal(stored, bfloat16_values(bfloat16_bits(values)))


def test_the_engine_on_a_neutral_folder_is_the_dense_model(
    neutral: Path, tiny: Any, dense_reference: Callable[[Path], Any]
) -> None:
    ids = [5, 77, 200, 3, 9, 41]
    engine = Engine.open(neutral, warm=False)
    np.testing.assert_allclose(engine.logits(ids), dense_reference(tiny.gguf).logits(ids), atol=1e-3)
    engine.close()


def test_the_index_names_every_tensor_once_and_shards_are_sound(folder: Path, stored_tensors: Stored) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="numpy") as file:
            found |= dict.fromkeys(file.keys(), shard.name)
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        values.size * (4 if name.endswith("bias") else 2) for name, values in stored_tensors(folder).items()
    )


def test_data_begins_at_a_page_and_an_expert_is_one_stretch(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert (8 + length) % ALIGNMENT == 0
        header = json.loads(raw[8 : 8 + length])
        owners: dict[str, list[list[int]]] = {}
        for name, entry in header.items():
            if ".experts." in name:
                owners.setdefault(name.rsplit(".", 2)[0], []).append(entry["data_offsets"])
        assert len(owners) % 6 == 0
        assert owners
        for (a, b), (c, d), (e, _) in owners.values():
            assert a < b == c < d == e


def test_the_configuration_describes_the_carving(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "glm4_moe"
    assert config["n_routed_experts"] == 6
    assert config["num_experts_per_tok"] == 3
    assert config["n_shared_experts"] * config["moe_intermediate_size"] == 48
    assert (
        config["eos_token_id"]
        == json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        == [0, 2]
    )
    assert (folder / "chat_template.jinja").read_text() == json.loads(
        (folder / "tokenizer_config.json").read_text()
    )["chat_template"]


def test_a_recipe_for_another_shape_is_refused(
    tiny: Any, tmp_path: Path, write_gguf: Callable[..., None]
) -> None:
    other = tmp_path / "other.gguf"
    write_gguf(other, layers=2)
    with pytest.raises(ModelError, match="2 layers"):
        write_model(tmp_path, read_gguf(other), tiny.recipe, lambda: None)
