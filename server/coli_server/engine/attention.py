"""Attention over a key/value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.families.common import TensorNames
from coli_server.engine.kernels import HeadShape
from coli_server.engine.latent import LatentBlock
from coli_server.engine.spec import Attention, GroupedQueryAttention
from coli_server.engine.step import Step
from coli_server.engine.weights import Matrix, Weights

F32 = NDArray[np.float32]
Angles = tuple[F32, F32]  # cosines and sines, each [rows, rotary dim / 2]


class AttentionBlock(Protocol):
    """One layer's attention, whatever its kind."""

    def forward(self, x: F32, step: Step, angles: Angles | None) -> F32:
        """float32 [rows, hidden] -> [rows, hidden]; writes the rows' keys and values into their caches."""


def load_attention(
    weights: Weights, names: TensorNames, spec: Attention, layer: int, hidden: int, eps: float
) -> AttentionBlock:
    """Read the attention of `layer` that `spec` describes."""
    if isinstance(spec, GroupedQueryAttention):
        return GqaBlock.load(weights, names, spec, layer, hidden, eps)
    return LatentBlock.load(weights, names, spec, layer, hidden)


@dataclass(frozen=True, slots=True)
class GqaBlock:
    """The weights of one layer's attention.

    `shape` says what happens to the heads between projection and attention, `cache` how they lie in the
    layer's KV cache.
    """

    spec: GroupedQueryAttention
    layer: int
    qkv: Matrix
    out: Matrix
    shape: HeadShape
    cache: NDArray[np.int64]
    sinks: F32 | None

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: TensorNames,
        spec: GroupedQueryAttention,
        layer: int,
        hidden: int,
        eps: float,
    ) -> GqaBlock:
        prefix = names.layer.format(layer=layer)
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        q_norm = k_norm = None
        if spec.qk_norm != "none":
            q_size, k_size = (q, kv) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            q_norm = weights.vector(f"{prefix}{names.q_norm}.weight", q_size)
            k_norm = weights.vector(f"{prefix}{names.k_norm}.weight", k_size)
        interleaved = spec.rope is not None and spec.rope.interleaved
        one = np.empty((1, spec.kv_heads, spec.head_dim), np.float32)
        return cls(
            spec,
            layer,
            weights.matrix(
                [prefix + names.q, prefix + names.k, prefix + names.v],
                [q, kv, kv],
                hidden,
                bias=spec.qkv_bias,
            ),
            weights.matrix([prefix + names.out], [hidden], q, bias=spec.out_bias),
            HeadShape(spec.heads, spec.kv_heads, spec.head_dim, q_norm, k_norm, eps, spec.clip, interleaved),
            kernels.kv_layout(one, one),
            weights.vector(prefix + names.sinks, spec.heads) if spec.sinks else None,
        )

    def forward(self, x: F32, step: Step, angles: Angles | None) -> F32:
        """Attention of every row of `step`: float32 [rows, hidden] -> [rows, hidden].

        Writes the rows' keys and values into their sequences' caches.
        """
        spec, bases, positions = self.spec, step.bases[self.layer], step.positions
        q = kernels.split_heads(self.qkv(x), self.shape, angles, positions, bases)
        mixed = np.empty_like(q)
        for at, end, together in step.runs:
            rows = (q, bases, positions, mixed)
            if len(step.runs) > 1:
                rows = (q[at:end], bases[at:end], positions[at:end], mixed[at:end])
            kernels.attend(self.cache, *rows, spec.scale, spec.window, self.sinks, together)
        return self.out(mixed.reshape(len(x), spec.heads * spec.head_dim))
