"""The dense model's forward pass over many windows at once, layer by layer, in float32 NumPy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.cluster import swiglu
from coli_server.models.dense import DenseModel, bfloat16_bits, bfloat16_values

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """One layer's weights, rounded to bfloat16 as the carved model stores them; [out, in]."""

    input_norm: Float32
    q: Float32
    k: Float32
    v: Float32
    o: Float32
    ffn_norm: Float32
    gate: Float32
    up: Float32
    down: Float32

    def feed_forward(self, u: Float32) -> Float32:
        return swiglu(u, self.gate, self.up) @ self.down.T


def rounded(dense: DenseModel, name: str) -> Float32:
    """A tensor as the carved model stores it: rounded to bfloat16."""
    return bfloat16_values(bfloat16_bits(dense.tensor(name)))


def load_layer(dense: DenseModel, layer: int, scale: Float32 | None = None) -> Layer:
    """A layer of the dense model; `scale` [neurons] multiplies its neurons' outputs before rounding."""
    names = ("input_layernorm", *(f"self_attn.{n}_proj" for n in "qkvo"), "post_attention_layernorm")
    names += ("mlp.gate_proj", "mlp.up_proj")
    weights = [rounded(dense, f"model.layers.{layer}.{name}.weight") for name in names]
    down = dense.tensor(f"model.layers.{layer}.mlp.down_proj.weight")
    weights.append(bfloat16_values(bfloat16_bits(down if scale is None else down * scale)))
    return Layer(*weights)


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    return np.asarray(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * weight)


def rotary(positions: NDArray[np.int64], head_dim: int, theta: float) -> tuple[Float32, Float32]:
    """Cosines and sines, [..., head_dim / 2], for positions [...]."""
    angle = positions[..., None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Turn the two halves of each head; x: [windows, heads, tokens, head_dim]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(dense: DenseModel, layer: Layer, x: Float32) -> Float32:
    """What causal attention adds to the residual stream x, [windows, tokens, hidden]."""
    config = dense.config
    windows, tokens, _ = x.shape
    h = rms_norm(x, layer.input_norm, config.norm_eps)

    def heads(weight: Float32, count: int) -> Float32:
        return (h @ weight.T).reshape(windows, tokens, count, config.head_dim).swapaxes(1, 2)

    cos, sin = rotary(np.arange(tokens), config.head_dim, config.rope_theta)
    q = rotate(heads(layer.q, config.heads), cos, sin)
    k = rotate(heads(layer.k, config.kv_heads), cos, sin)
    group = config.heads // config.kv_heads
    k, v = k.repeat(group, axis=1), heads(layer.v, config.kv_heads).repeat(group, axis=1)
    scores = q @ k.swapaxes(2, 3) / np.float32(np.sqrt(config.head_dim))
    scores[..., np.triu(np.ones((tokens, tokens), dtype=bool), 1)] = -np.inf
    weights = softmax(scores)
    return np.asarray((weights @ v).swapaxes(1, 2).reshape(windows, tokens, -1) @ layer.o.T)


def softmax(scores: Float32) -> Float32:
    """Over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
