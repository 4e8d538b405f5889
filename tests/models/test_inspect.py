"""What `coli inspect` says of a folder: from headers alone, for every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from coli_server.cli import main
from coli_server.engine import Engine
from coli_server.errors import ConfigurationError, ModelError
from coli_server.experts import CheckpointIndex, PreadReader, safetensors_header
from coli_server.models.inspect import inspect_folder

MODELS = Path(__file__).parents[1] / "data" / "models"
FOLDERS = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
PLAIN = [name for name in FOLDERS if not name.startswith("gpt_oss")]  # one value stored, one parameter


@pytest.mark.parametrize("name", FOLDERS)
def test_sizes_add_up_to_the_files(name: str) -> None:
    found = inspect_folder(MODELS / name)
    index = CheckpointIndex.open(MODELS / name)
    assert found.experts_bytes + found.dense_bytes == index.nbytes
    assert found.experts_bytes == found.moe_layers * found.experts * found.expert_bytes
    assert found.active_parameters < found.parameters
    assert found.reads[0].bytes == (found.moe_layers * found.experts_per_token * found.expert_bytes)


@pytest.mark.parametrize("name", PLAIN)
def test_parameters_are_those_of_the_files(name: str) -> None:
    found = inspect_folder(MODELS / name)
    index = CheckpointIndex.open(MODELS / name)
    assert found.parameters == sum(int(np.prod(tensor.shape)) for tensor in index.values())
    inactive = found.moe_layers * (found.experts - found.experts_per_token) * found.expert_bytes
    assert found.parameters - found.active_parameters == inactive // 2  # two bytes a parameter


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa", "mixtral", "gpt_oss-mxfp4"])
def test_figures_are_those_of_the_running_engine(name: str) -> None:
    found = inspect_folder(MODELS / name, ["2G"])
    engine = Engine.open(MODELS / name, ram="2G", warm=False)
    kv = engine.new_kv(8)
    assert found.kv_token_bytes == kv.nbytes // 8
    assert found.budgets[0].slots_per_layer == engine.cache.slots_per_layer
    assert found.budgets[0].context_length == engine.context_length
    assert found.family == engine.model_type
    engine.close()


def test_latent_attention_shows_what_it_saves() -> None:
    found = inspect_folder(MODELS / "deepseek_v3")
    assert found.kv_token_bytes == 4 * 3 * (32 + 8)  # layers * (latent + rotated key), float32
    assert found.kv_token_bytes_expanded == 4 * 3 * 4 * (16 + 8 + 16)


def sparse_copy(folder: Path, layers: int) -> int:
    """A mixtral of `layers` layers whose expert tensors would be gigabytes, one shard a layer, all holes."""
    config = json.loads((MODELS / "mixtral" / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    d, f, v = 4096, 14336, 32000
    rest = {"model.embed_tokens.weight": [v, d], "lm_head.weight": [v, d], "model.norm.weight": [d]}
    shards = [rest]
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shard = {f"{prefix}{norm}.weight": [d] for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096)):
            shard[f"{prefix}self_attn.{name}_proj.weight"] = [rows, d]
        shard[f"{prefix}block_sparse_moe.gate.weight"] = [8, d]
        for expert in range(8):
            for name, shape in (("w1", [f, d]), ("w2", [d, f]), ("w3", [f, d])):
                shard[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = shape
        shards.append(shard)
    for number, shard in enumerate(shards):
        header, end = {}, 0
        for name, shape in shard.items():
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        raw = json.dumps(header).encode()
        with open(folder / f"model-{number:05}.safetensors", "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
    return len(shards)


def test_hundreds_of_shards_are_read_by_their_headers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = sparse_copy(tmp_path / "wide", 200)
    headers: list[Path] = []
    read_header = safetensors_header._header_bytes

    def counted(file: Path) -> tuple[bytes, int]:
        headers.append(file)
        return read_header(file)

    monkeypatch.setattr(safetensors_header, "_header_bytes", counted)
    monkeypatch.setattr(PreadReader, "preadv", lambda *_: pytest.fail("inspection read weights"))
    found = inspect_folder(tmp_path / "wide", ["32G"])
    assert len(headers) == len(set(headers)) == found.shards == shards
    assert found.parameters > 280e9
    assert found.expert_bytes == 3 * 4096 * 14336 * 2
    assert found.budgets[0].problem is not None
    assert found.budgets[0].problem.startswith("too small: the least is --ram=")


def test_layers_that_are_not_loaded_are_not_counted(tmp_path: Path) -> None:
    """A layer behind the last one predicts further tokens in training; it must not eat the memory budget."""
    shutil.copytree(MODELS / "glm4_moe", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    whole, less = inspect_folder(MODELS / "glm4_moe"), inspect_folder(tmp_path / "m")
    layer = [t for name, t in CheckpointIndex.open(tmp_path / "m").items() if ".layers.2." in name]
    dropped = sum(tensor.nbytes for tensor in layer)
    assert whole.dense_bytes + whole.experts_bytes - less.dense_bytes - less.experts_bytes == dropped
    assert whole.parameters - less.parameters == sum(int(np.prod(tensor.shape)) for tensor in layer)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(MODELS / "granitemoe"), "--ram", "2G", "--hit", "75", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["experts"], found["experts_per_token"]) == ("granitemoe", 8, 2)
    assert found["reads"] == [{"hit": 0.75, "bytes": 3 * 2 * found["expert_bytes"] // 4}]
    assert main(["inspect", str(MODELS / "granitemoe"), "--ram", "2G", "--ram", "1M"]) == 0
    text = capsys.readouterr().out
    assert "8 a layer, 2 for a token" in text
    assert "--ram 1M" in text
    assert "too small" in text


@pytest.mark.parametrize("words", [["--ram", "much"], ["--hit", "101"], ["--hit", "x"]])
def test_bad_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(MODELS / "granitemoe"), *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="much"):
        inspect_folder(MODELS / "granitemoe", ["much"])
