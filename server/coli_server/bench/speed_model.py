"""The model that speed is measured with: OLMoE-1B-7B's shape, fewer layers, random weights from a seed.

It routes uniformly, which is the worst that a cache of experts can meet: every token chooses its experts
without regard to the ones before. The same tensors are written as a GGUF file for the peer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.model import Checkpoint
from coli_server.models.checkpoint import Tensor, write_shard
from coli_server.models.dense import bfloat16_bits, bfloat16_values

LAYERS, HIDDEN, WIDTH, EXPERTS, K, HEADS, VOCAB = 8, 2048, 1024, 64, 8, 16, 50304
CONTEXT, EPS, THETA, DEVIATION, SEED = 4096, 1e-5, 10000.0, 0.02, 1

# Factors on the deviation. If they were one, attention, a mean over the text, would drown the token itself:
# neighbours would choose the same experts. And experts would add so little that no test would see wrong ones.
EMBEDDING_FACTOR, DOWN_FACTOR = 64, 16

Say = Callable[[str], object]


def make_model(folder: Path, layers: int, say: Say) -> Path:
    """The folder `olmoe-<layers>-uniform` in `folder`, made if it is not there."""
    made = folder / f"olmoe-{layers}-uniform"
    if made.exists():
        return made
    part = made.with_name(made.name + ".partial")
    part.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        say(f"making layer {layer + 1} of {layers} of the benchmark model")
        _write(part, f"model-{layer:05d}.safetensors", list(_layer(layer)), weight_map)
    _write(part, "model-dense.safetensors", list(_ends()), weight_map)
    index = {"metadata": {}, "weight_map": weight_map}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    (part / "config.json").write_text(json.dumps(_config(layers), indent=2))
    (part / "tokenizer.json").write_text(_tokenizer())
    os.replace(part, made)
    return made


def _write(folder: Path, name: str, tensors: list[Tensor], weight_map: dict[str, str]) -> None:
    write_shard(folder / name, tensors)
    weight_map |= {tensor.name: name for tensor in tensors}


def _layer(layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}."
    for expert in range(EXPERTS):
        for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            factor = DOWN_FACTOR if part == "down" else 1
            yield _random(f"{prefix}mlp.experts.{expert}.{part}_proj.weight", *shape, factor=factor)
    yield _random(f"{prefix}mlp.gate.weight", EXPERTS, HIDDEN)
    for part in "qkvo":
        yield _random(f"{prefix}self_attn.{part}_proj.weight", HIDDEN, HIDDEN)
    for part in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
        yield _ones(f"{prefix}{part}.weight")


def _ends() -> Iterator[Tensor]:
    yield _random("model.embed_tokens.weight", VOCAB, HIDDEN, factor=EMBEDDING_FACTOR)
    yield _random("lm_head.weight", VOCAB, HIDDEN)
    yield _ones("model.norm.weight")


def _random(name: str, *shape: int, factor: int = 1) -> Tensor:
    """Normal numbers that the name and the seed decide, `factor` times as large as usual."""
    seed = int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:8], "little")
    values = np.random.Generator(np.random.SFC64(seed)).standard_normal(shape, np.float32)
    values *= np.float32(DEVIATION * factor)
    return Tensor(name, "BF16", bfloat16_bits(values))


def _ones(name: str) -> Tensor:
    return Tensor(name, "BF16", bfloat16_bits(np.ones(HIDDEN, np.float32)))


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "max_position_embeddings": CONTEXT,
        "norm_topk_prob": False,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }


def _tokenizer() -> str:
    """Bytes as tokens, without merges; higher ids are words, so that every token that is made has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, *(f"t{n}" for n in range(256, VOCAB))])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


_PEER_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PEER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


def make_gguf(model: Path, say: Say) -> Path:
    """The tensors of `model` as a GGUF file beside it, made if it is not there. Needs the package gguf."""
    made = model.with_name(model.name + "-bf16.gguf")
    if made.exists():
        return made
    say(f"making {made.name}")
    from gguf import GGMLQuantizationType, GGUFWriter

    part = made.with_name(made.name + ".partial")
    index, layers = Checkpoint.open(model).weights.index, json.loads((model / "config.json").read_text())
    writer = GGUFWriter(part, "olmoe", use_temp_file=False)
    _add_metadata(writer, int(layers["num_hidden_layers"]))

    def add(name: str, data: NDArray[Any]) -> None:
        if data.ndim == 1 or "gate_inp" in name:
            writer.add_tensor(name, bfloat16_values(data))
        else:
            writer.add_tensor(name, data.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)

    for name, theirs in _PEER_ENDS.items():
        add(f"{theirs}.weight", index.read(f"{name}.weight"))
    for layer in range(int(layers["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        for name, theirs in _PEER_NAMES.items():
            add(f"blk.{layer}.{theirs}.weight", index.read(f"{prefix}{name}.weight"))
        for part_name in ("gate", "up", "down"):
            names = [f"{prefix}mlp.experts.{e}.{part_name}_proj.weight" for e in range(EXPERTS)]
            add(f"blk.{layer}.ffn_{part_name}_exps.weight", np.stack([index.read(name) for name in names]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, made)
    return made


def _add_metadata(writer: Any, layers: int) -> None:
    writer.add_name("Coli benchmark")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(K)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
