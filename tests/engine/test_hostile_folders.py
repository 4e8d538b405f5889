"""Broken and hostile model folders: each is refused before anything runs, and the culprit is named."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coli_server.cli import main
from coli_server.engine import Engine
from coli_server.errors import ColiError

MODELS = Path(__file__).parents[1] / "data" / "models"
SHARD = "model-00005-of-00011.safetensors"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A writable copy of a checkpoint: mixtral, or the one that the test is parametrized with."""
    name = getattr(request, "param", "mixtral")
    shutil.copytree(MODELS / name, tmp_path / name)
    for file in (tmp_path / name).iterdir():
        file.chmod(0o644)
    return tmp_path / name


def refused(folder: Path, *culprits: str) -> None:
    """The folder must be refused with one line that names every culprit."""
    with pytest.raises(ColiError) as caught:
        Engine.open(folder, warm=False, threads=1)
    message = str(caught.value)
    assert "\n" not in message
    for culprit in culprits:
        assert culprit in message, message


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file; its data stays."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])


@pytest.mark.parametrize("folder", ["olmoe"], indirect=True)
def test_a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    refused(folder, SHARD)


@pytest.mark.parametrize("folder", ["olmoe"], indirect=True)
def test_a_tensor_in_two_shards(folder: Path) -> None:
    first, second = folder / "model-00002-of-00011.safetensors", folder / "model-00003-of-00011.safetensors"
    shutil.copy(first, second)
    refused(folder, second.name, first.name, "tensor 'model.")


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.block_sparse_moe.gate.weight",
        "model.layers.2.block_sparse_moe.experts.7.w2.weight",
    ],
)
def test_a_missing_or_misshapen_tensor(folder: Path, tensor: str) -> None:
    file = folder / "model.safetensors"

    def rename(header: dict[str, Any]) -> None:
        header[f"{tensor}.other"] = header.pop(tensor)

    def reshape(header: dict[str, Any]) -> None:
        header[tensor]["shape"] = [*header[tensor]["shape"], 1]

    def retype(header: dict[str, Any]) -> None:
        header[tensor]["dtype"] = "I16"

    whole = file.read_bytes()
    for change in (rename, reshape, retype):
        file.write_bytes(whole)
        change_header(file, change)
        refused(folder, tensor)


def test_a_tensor_that_has_no_place(folder: Path) -> None:
    def extend(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header["model.layers.0.self_attn.q_proj.bias"] = {
            "dtype": "BF16",
            "shape": [64],
            "data_offsets": [end, end + 128],
        }

    file = folder / "model.safetensors"
    change_header(file, extend)
    file.write_bytes(file.read_bytes() + bytes(128))
    refused(folder, "model.safetensors", "model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize("keep", [0, 4, 8, 1000, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, "model.safetensors")


def test_overlapping_and_outlying_offsets(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for begin, end in ((0, 64 * 2), (-128, 0), (1 << 60, (1 << 60) + 128)):
        file.write_bytes(whole)
        change_header(
            file, lambda header, at=(begin, end): header["model.norm.weight"].update(data_offsets=at)
        )  # type: ignore[misc]
        refused(folder, "model.safetensors", "model.")


def test_a_name_twice_in_a_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(
        b"model.layers.1.input_layernorm.weight", b"model.layers.2.input_layernorm.weight"
    )
    file.write_bytes(raw[:8] + header + raw[8 + size :])
    refused(folder, "model.safetensors", "model.layers.2.input_layernorm.weight")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 1 << 40),
        ("hidden_size", -64),
        ("hidden_size", 0),
        ("hidden_size", 64.5),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 10**400),
        ("num_hidden_layers", 1 << 31),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 3),
        ("num_local_experts", 1 << 30),
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", 0),
        ("max_position_embeddings", 1 << 62),
        ("vocab_size", -1),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", 1e400),
        ("rope_theta", 1.0),
        ("rope_theta", -1),
        ("rope_scaling", {"type": "yarn", "factor": 0}),
        ("rope_scaling", {"type": "spiral"}),
        ("rope_scaling", "yarn"),
        ("sliding_window", -1),
        ("eos_token_id", 512),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", "</s>"),
        ("model_type", "no-such-family"),
        ("model_type", ["mixtral"]),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_absurd_configuration(folder: Path, key: str, value: object) -> None:
    change_config(folder, **{key: value})
    refused(folder, "config.json" if value != 1e400 else "", key if value != 1e400 else "")


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("hidden_size", 128, "shape"),
        ("head_dim", 1 << 24, "shape"),
        ("num_hidden_layers", 1024, "model.layers.3."),
        ("num_local_experts", 1 << 14, "experts.8."),
        ("intermediate_size", 1 << 24, "shape"),
        ("vocab_size", 1 << 24, "model.embed_tokens.weight"),
    ],
)
def test_sizes_that_the_tensors_do_not_have(folder: Path, key: str, value: int, tensor: str) -> None:
    """Headers are compared with the configuration before anything of these sizes is allocated."""
    change_config(folder, **{key: value})
    refused(folder, "tensor", tensor)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff\xfe", b"[" * 100000, b'{"a": NaN}']
)
def test_a_configuration_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json")


def test_an_enormous_configuration_is_refused_unread(folder: Path) -> None:
    with open(folder / "config.json", "wb") as file:
        file.truncate(1 << 40)
    refused(folder, "config.json", "larger than")


def test_end_tokens_of_generation_config_outside_the_vocabulary(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 512]}')
    refused(folder, "generation_config.json", "eos_token_id", "511")


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|beyond|>"])
    tokenizer.save(str(path))
    refused(folder, "tokenizer.json", "512")


def test_a_tokenizer_that_is_none(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(folder, "tokenizer.json")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages %}",
    ],
    ids=["loops", "reaches", "recurses", "unfinished"],
)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_that_loops_or_reaches_for_attributes(
    folder: Path, template: str, place: str
) -> None:
    content = template if place.endswith("jinja") else json.dumps({"chat_template": template})
    (folder / place).write_text(content)
    refused(folder, place, "chat template")


@pytest.mark.parametrize("folder", ["granitemoe"], indirect=True)
def test_fused_experts_of_another_number(folder: Path) -> None:
    change_config(folder, num_local_experts=9)
    refused(folder, "input_linear.weight", "[8, 96, 64]", "[9, 96, 64]")


def test_a_folder_that_is_refused_leaves_no_thread_behind(folder: Path) -> None:
    change_header(
        folder / "model.safetensors",
        lambda header: header["model.norm.weight"].update(shape=[64, 1]),
    )
    before = threading.active_count()
    for _ in range(3):
        refused(folder, "model.norm.weight")
    assert threading.active_count() == before


@pytest.mark.parametrize("command", ["gen", "serve", "inspect"])
def test_commands_say_it_in_one_line(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, vocab_size=513)
    words = {
        "gen": ["gen", "--model", str(folder), "hi"],
        "serve": ["serve", "--model", str(folder), "--listen", "127.0.0.1:0"],
        "inspect": ["inspect", str(folder)],
    }
    assert main(words[command]) == 1
    message = capsys.readouterr().err
    assert "model.embed_tokens.weight" in message
    assert "Traceback" not in message


def test_a_folder_that_does_not_exist_is_told_from_one_without_a_model(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} has no config.json", "a Hugging Face folder with config.json")
    refused(tmp_path / "absent", f"{tmp_path / 'absent'} does not exist", "a Hugging Face folder")
