"""Write a carved model as a Hugging Face `glm4_moe` folder."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError
from coli_server.models.dense import DenseConfig, DenseModel, Vocabulary, bfloat16_bits
from coli_server.models.recipe import Recipe
from coli_server.models.tokenizer import tokenizer_config, tokenizer_json

ALIGNMENT = 4096
"""Shards' data begins at a multiple of this, and experts come first, so that direct reads need no copy."""

SHARDS = 4

ROUTED_SCALING_FACTOR = 2.0
"""A chosen expert weighs 2 * sigmoid(z): with a score of 0, its part of the dense feed-forward output."""

_KEPT = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
)


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: `dtype` is safetensors' name, uint16 `data` holds bfloat16 bits."""

    name: str
    dtype: str
    data: NDArray[Any]


def write_model(folder: Path, dense: DenseModel, recipe: Recipe, on_layer: Callable[[], object]) -> None:
    """Carve `dense` by `recipe` into `folder`, which must exist; every file is synced to disk.

    `on_layer` is called after each layer.
    """
    config, vocabulary = dense.config, dense.vocabulary
    shape = (recipe.layers, recipe.order.shape[1], recipe.router.shape[2])
    if shape != (config.layers, config.ffn, config.hidden):
        raise ModelError(f"the recipe does not fit a model of {config.layers} layers of {config.ffn} neurons")
    _write_json(folder / "config.json", glm4_moe_config(config, vocabulary, recipe))
    _write_json(folder / "generation_config.json", _generation_config(vocabulary))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, config.context))
    write_synced(folder / "tokenizer.json", tokenizer_json(vocabulary).encode())
    write_synced(folder / "chat_template.jinja", vocabulary.chat_template.encode())
    weight_map: dict[str, str] = {}
    total = 0
    shards = min(SHARDS, config.layers)
    for number, layers in enumerate(np.array_split(np.arange(config.layers), shards), start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors: list[Tensor] = []
        for layer in layers:
            tensors += carve_layer(dense, recipe, int(layer))
            on_layer()
        if number == 1:
            tensors += [_bfloat16("model.embed_tokens.weight", dense), _bfloat16("model.norm.weight", dense)]
        # All layers' experts first: they are whole pages, and what is behind them is not.
        tensors.sort(key=lambda tensor: ".mlp.experts." not in tensor.name)
        write_shard(folder / name, tensors)
        weight_map |= {tensor.name: name for tensor in tensors}
        total += sum(tensor.data.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def carve_layer(dense: DenseModel, recipe: Recipe, layer: int) -> Iterator[Tensor]:
    """One layer's tensors, routed experts first, each expert's three matrices together."""
    prefix = f"model.layers.{layer}."
    # SwiGLU neurons are independent: rows of gate and up, columns of down. Rounding before the split keeps
    # a neutral recipe equal to the dense model rounded in the same way.
    gate, up = (bfloat16_bits(dense.tensor(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up"))
    down = bfloat16_bits(dense.tensor(f"{prefix}mlp.down_proj.weight") * recipe.neuron_scale(layer))

    def part(owner: str, neurons: NDArray[np.uint16]) -> Iterator[Tensor]:
        yield Tensor(f"{prefix}mlp.{owner}.gate_proj.weight", "BF16", gate[neurons])
        yield Tensor(f"{prefix}mlp.{owner}.up_proj.weight", "BF16", up[neurons])
        yield Tensor(f"{prefix}mlp.{owner}.down_proj.weight", "BF16", np.ascontiguousarray(down[:, neurons]))

    for expert in range(recipe.experts):
        yield from part(f"experts.{expert}", recipe.expert_neurons(layer, expert))
    yield from part("shared_experts", recipe.shared_neurons(layer))
    yield Tensor(f"{prefix}mlp.gate.weight", "BF16", recipe.router[layer])
    yield Tensor(f"{prefix}mlp.gate.e_score_correction_bias", "F32", recipe.router_bias[layer])
    for name in _KEPT:
        yield _bfloat16(prefix + name, dense)


def glm4_moe_config(config: DenseConfig, vocabulary: Vocabulary, recipe: Recipe) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": end_tokens(vocabulary),
        "first_k_dense_replace": 0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.context,
        "model_type": "glm4_moe",
        "moe_intermediate_size": recipe.expert_width,
        "n_group": 1,
        "n_routed_experts": recipe.experts,
        "n_shared_experts": recipe.shared // recipe.expert_width,
        "norm_topk_prob": False,
        "num_attention_heads": config.heads,
        "num_experts_per_tok": recipe.experts_per_token,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": vocabulary.pad,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
        "tie_word_embeddings": True,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": config.vocab,
    }


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """Ids that end a generation: the end of a turn and the end of a text."""
    return sorted({vocabulary.eos, vocabulary.unknown})


def _generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "bos_token_id": vocabulary.bos,
        "eos_token_id": end_tokens(vocabulary),
        "pad_token_id": vocabulary.pad,
    }


def write_shard(path: Path, tensors: list[Tensor]) -> None:
    """Write a safetensors file in the order given; its data begins at a multiple of `ALIGNMENT`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.data.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.data).tobytes())
        _sync(file.fileno(), file.flush)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file.fileno(), file.flush)


def _sync(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_synced(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def _bfloat16(name: str, dense: DenseModel) -> Tensor:
    return Tensor(name, "BF16", bfloat16_bits(dense.tensor(name)))
