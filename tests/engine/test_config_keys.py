"""Every key of a config.json is understood, known to be irrelevant, or refused by name; never ignored.

For every checkpoint of tests/data/models, each key that its family reads is changed in type and in value:
an error names it, or the outcome changes: logits, context length or end tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.config import IRRELEVANT, Config
from coli_server.engine.families import MODEL_TYPES, family_of
from coli_server.engine.model import Checkpoint
from coli_server.engine.spec import DenseMlp, ModelSpec
from coli_server.errors import ColiError, ModelError

MODELS = Path(__file__).parents[1] / "data" / "models"
FOLDERS = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
SECTIONS = ("rope_parameters", "rope_scaling", "quantization_config")


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((MODELS / name / "config.json").read_text()))


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    view = Config(config)
    return family_of(view).read(view)


def consumed(config: Mapping[str, Any]) -> list[str]:
    """The keys of `config` that its family reads and that are not null."""
    view = Config(config)
    family_of(view).read(view)
    view.raw("eos_token_id")
    return sorted(key for key in view.consumed if config.get(key) is not None and key != "model_type")


def sleeping(config: Mapping[str, Any]) -> dict[str, str]:
    """Keys that are read and checked, and that others of this `config` put out of use, with the reason."""
    found = {}
    if not config.get("use_sliding_window", True):
        for key in ("sliding_window", "max_window_layers", "layer_types"):
            found[key] = "use_sliding_window is false"
    if config.get("layer_types"):
        found["max_window_layers"] = "layer_types says it"
    if config.get("n_group", 2) == 1 or config.get("topk_method") == "greedy":
        found["topk_group"] = found["n_group"] = "there are no groups"
    layers = spec_of(config).layers
    if "moe_intermediate_size" in config and not any(isinstance(layer.mlp, DenseMlp) for layer in layers):
        found["intermediate_size"] = "no layer is dense"
    if config.get("mlp_layer_types"):
        found["first_k_dense_replace"] = "mlp_layer_types says it"
    if "qk_rope_head_dim" in config:
        found["head_dim"] = "the parts of a latent head say it"
    if config.get("quantization_config"):
        found["quantization_config"] = "the tensors that stay plain are known by their names"
    return found


def changes(value: Any) -> Iterator[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(value - 1, 0), value * 2, value // 2, 1)
    elif isinstance(value, float):
        yield from (value * 1.5, value / 2, value + 1)
    elif isinstance(value, str):
        yield "no-such-word"
    elif isinstance(value, list):
        for i in range(len(value)):
            for other in changes(value[i]):
                yield [*value[:i], other, *value[i + 1 :]]
        yield from ([0], [1])


def written(config: Mapping[str, Any], name: str, folder: Path) -> Path:
    """A folder with this config.json and the tensors of the checkpoint `name`."""
    folder.mkdir(exist_ok=True)
    for file in (MODELS / name).iterdir():
        link = folder / file.name
        if ".safetensors" in file.name and not link.exists():
            link.symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def outcome(folder: Path, ids: list[int]) -> tuple[object, ...]:
    """What a user can see of a model: its logits, its longest context, its end tokens."""
    engine = Engine.open(folder, warm=False, threads=1)
    try:
        logits = engine.logits(ids[: engine.context_length])
        return logits.tobytes(), engine.context_length, engine.end_ids
    finally:
        engine.close()


def mutations(config: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """`config` with one other value of `key`, or of one entry of the section `key`."""
    if key in SECTIONS:
        for entry, value in config[key].items():
            for other in changes(value):
                yield {**config, key: {**config[key], entry: other}}
    else:
        for other in changes(config[key]):
            yield {**config, key: other}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_key_of_another_type_is_refused_by_name(name: str) -> None:
    config = read(name)
    for key in consumed(config):
        for value in ({"no": "such"}, "no-such-word", [["no"]], 1e400, -7):
            if isinstance(value, dict) and key in SECTIONS:
                continue
            view = Config({**config, key: value})
            with pytest.raises(ColiError, match=key):
                Checkpoint.read_config(view, MODELS / name)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_entry_of_a_section_of_another_type_is_refused_by_name(name: str) -> None:
    config = read(name)
    for section in SECTIONS:
        for entry in config.get(section) or {}:
            broken = {**config, section: {**config[section], entry: {"no": "such"}}}
            with pytest.raises(ColiError, match=entry if entry != "type" else "rope_type"):
                Checkpoint.read_config(Config(broken), MODELS / name)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_key_that_is_read_matters(name: str, tmp_path: Path) -> None:
    config = read(name)
    ids = np.load(MODELS / name / "expected.npz")["ids_2"].tolist()
    stock = outcome(written(config, name, tmp_path / "m"), ids)
    asleep = sleeping(config)
    ignored = []
    for key in consumed(config):
        results = set()
        for mutated in mutations(config, key):
            results.add(effect(mutated, key, name, tmp_path / "m", ids, stock))
            if "change" in results:
                break
        if "none" in results and "change" not in results:
            ignored.append(key)
    assert [key for key in ignored if key not in asleep] == []


def effect(
    config: dict[str, Any], key: str, name: str, folder: Path, ids: list[int], stock: tuple[object, ...]
) -> str:
    """What changing `key` did: a `change` that shows, a `refusal` by name, or `none`."""
    try:
        return "change" if outcome(written(config, name, folder), ids) != stock else "none"
    except ColiError as error:
        message = str(error)
    if f"{key}=" in message or any(f"{key}: {entry}=" in message for entry in entries(config, key)):
        return "refusal"
    # What no longer fits is named: a tensor, or another key.
    assert "tensor" in message or any(other in message for other in consumed_names(config)), message
    return "change"


def entries(config: dict[str, Any], key: str) -> list[str]:
    return list(config[key]) if key in SECTIONS else []


def consumed_names(config: dict[str, Any]) -> list[str]:
    return [*config, *(entry for section in SECTIONS for entry in config.get(section) or {})]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("section", [None, *SECTIONS])
def test_an_invented_key_is_refused_by_name(name: str, section: str | None) -> None:
    config = read(name)
    if section is None:
        config["no_such_option"] = 1
    elif config.get(section) is not None:
        config[section]["no_such_option"] = 1
    else:
        return
    with pytest.raises(ModelError, match="no_such_option"):
        Checkpoint.read_config(Config(config), MODELS / name)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_key_is_both_read_and_irrelevant(model_type: str) -> None:
    config = read(model_type)
    family = family_of(Config(config))
    assert not set(consumed(config)) & family.irrelevant
    assert not set(consumed(config)) & IRRELEVANT


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"model_type.*llama.*mixtral"):
        family_of(Config({"model_type": "llama"}))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_quantised_checkpoint_is_refused_by_name(name: str) -> None:
    config = read(name) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ModelError, match=r"quantization_config.*fp8"):
        Checkpoint.read_config(Config(config), MODELS / name)
