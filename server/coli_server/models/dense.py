"""The dense source model: a Llama-type GGUF file, read as Hugging Face tensors in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError

Float32 = NDArray[np.float32]

CONTROL_TOKEN = 3
"""GGUF's token type of control tokens such as `<|im_end|>`."""

_GLOBAL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
_LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclass(frozen=True)
class DenseConfig:
    """Shape of a Llama-type model: no biases, full rotary, SwiGLU, tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary: what `tokenizer.json` is rebuilt from."""

    tokens: tuple[str, ...]
    """Token texts in the byte-level alphabet, by id."""
    merges: tuple[tuple[str, str], ...]
    control: frozenset[int]
    bos: int
    eos: int
    pad: int
    unknown: int
    chat_template: str


@dataclass(frozen=True)
class DenseModel:
    """A dense model that is read tensor by tensor.

    `tensor(name)` gives one tensor under its Hugging Face name, float32, shape [out, in] or [n];
    it raises `ModelError` when the source has no such tensor.
    """

    config: DenseConfig
    vocabulary: Vocabulary
    tensor: Callable[[str], Float32]


def read_gguf(path: Path) -> DenseModel:
    """Open a Llama-type GGUF file with tied embeddings and a `smollm` byte-level vocabulary.

    Raises `ModelError` if the file is no GGUF or of another kind of model.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as a GGUF file: {error}") from error
    _expect(path, reader, "general.architecture", "llama")
    _expect(path, reader, "tokenizer.ggml.model", "gpt2")
    _expect(path, reader, "tokenizer.ggml.pre", "smollm")
    config = _config(path, reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in stored:
        raise ModelError(f"{path}: output.weight is present, but only tied embeddings are supported")

    def tensor(name: str) -> Float32:
        source = _gguf_name(name)
        if source not in stored:
            raise ModelError(f"{path}: tensor {source} ({name}) is missing")
        found = stored[source]
        values = np.asarray(gguf.dequantize(found.data, found.tensor_type), dtype=np.float32)
        if name.endswith("self_attn.q_proj.weight"):
            return split_halves(values, config.heads)
        if name.endswith("self_attn.k_proj.weight"):
            return split_halves(values, config.kv_heads)
        return values

    return DenseModel(config, _vocabulary(path, reader), tensor)


def split_halves(weight: Float32, heads: int) -> Float32:
    """Undo GGUF's reordering of rotary rows: interleaved pairs [.., 2] back to two halves a head.

    weight: [heads * head_dim, in], the same shape comes back.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round finite float32 values to bfloat16 (nearest, ties to even); the bits as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bfloat16_values(bits: NDArray[np.uint16]) -> Float32:
    """The float32 values that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _gguf_name(name: str) -> str:
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    layer, _, role = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_TENSORS.get(role, role)}"


def _config(path: Path, reader: gguf.GGUFReader) -> DenseConfig:
    def number(key: str) -> Any:
        return _field(path, reader, f"llama.{key}")

    hidden, heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = hidden // heads
    if int(number("rope.dimension_count")) != head_dim:
        raise ModelError(f"{path}: rotary over part of a head is not supported")
    return DenseConfig(
        layers=int(number("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(number("attention.head_count_kv")),
        head_dim=head_dim,
        ffn=int(number("feed_forward_length")),
        vocab=int(number("vocab_size")),
        context=int(number("context_length")),
        rope_theta=float(number("rope.freq_base")),
        # Stored in float32: 1e-5 reads back as 9.99999974e-06, which no one would write in a config.
        norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
    )


def _vocabulary(path: Path, reader: gguf.GGUFReader) -> Vocabulary:
    def value(key: str) -> Any:
        return _field(path, reader, f"tokenizer.{key}")

    kinds = value("ggml.token_type")
    return Vocabulary(
        tokens=tuple(value("ggml.tokens")),
        merges=tuple(_pair(merge) for merge in value("ggml.merges")),
        control=frozenset(i for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN),
        bos=int(value("ggml.bos_token_id")),
        eos=int(value("ggml.eos_token_id")),
        pad=int(value("ggml.padding_token_id")),
        unknown=int(value("ggml.unknown_token_id")),
        chat_template=str(value("chat_template")),
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _field(path: Path, reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"{path}: metadata {key} is missing")
    return field.contents()


def _expect(path: Path, reader: gguf.GGUFReader, key: str, wanted: str) -> None:
    found = _field(path, reader, key)
    if found != wanted:
        raise ModelError(f"{path}: {key} is {found!r}, only {wanted!r} is supported")
