"""Attention over a key/value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.families.common import TensorNames
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
class QkNorm:
    """RMS norms of queries and keys: per head ([head_dim]) or over all heads ([heads * head_dim])."""

    q: F32
    k: F32
    eps: float


@dataclass(frozen=True, slots=True)
class GqaBlock:
    """The weights of one layer's attention."""

    spec: GroupedQueryAttention
    layer: int
    qkv: Matrix
    out: Matrix
    norm: QkNorm | None
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
        norm = None
        if spec.qk_norm != "none":
            q_size, k_size = (q, kv) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            norm = QkNorm(
                weights.vector(f"{prefix}{names.q_norm}.weight", q_size),
                weights.vector(f"{prefix}{names.k_norm}.weight", k_size),
                eps,
            )
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
            norm,
            weights.vector(prefix + names.sinks, spec.heads) if spec.sinks else None,
        )

    def forward(self, x: F32, step: Step, angles: Angles | None) -> F32:
        """Attention of every row of `step`: float32 [rows, hidden] -> [rows, hidden].

        Writes the rows' keys and values into their sequences' caches.
        """
        spec, rows = self.spec, len(x)
        qkv = self.qkv(x)
        size, split = spec.head_dim, spec.heads * spec.head_dim
        q = self._heads(qkv[:, :split], spec.heads, self.norm.q if self.norm else None)
        k = self._heads(
            qkv[:, split : split + spec.kv_heads * size], spec.kv_heads, self.norm.k if self.norm else None
        )
        v = qkv[:, split + spec.kv_heads * size :].reshape(rows, spec.kv_heads, size)
        if spec.clip is not None:
            for part in (q, k, v):
                np.clip(part, -spec.clip, spec.clip, out=part)
        if angles is not None:
            interleaved = spec.rope is not None and spec.rope.interleaved
            kernels.rope(q, *angles, interleaved)
            kernels.rope(k, *angles, interleaved)
        mixed = np.empty((rows, spec.heads, size), np.float32)
        for i, span in enumerate(step.spans):
            at, end, start = step.first[i], step.first[i + 1], step.starts[i]
            keys, values = span.sequence.kv.keys[self.layer], span.sequence.kv.values[self.layer]
            keys[start : start + end - at] = k[at:end]
            values[start : start + end - at] = v[at:end]
            kernels.attention(
                q[at:end], keys, values, step.positions[at:end], spec.scale,
                window=spec.window, sinks=self.sinks, out=mixed[at:end],
            )  # fmt: skip
        return self.out(mixed.reshape(rows, split))

    def _heads(self, flat: F32, heads: int, norm: F32 | None) -> F32:
        """Normalised heads, contiguous float32 [rows, heads, head_dim]."""
        rows, size = len(flat), self.spec.head_dim
        flat = np.ascontiguousarray(flat)  # for one row a view of the product, which nobody needs again
        if norm is not None and self.norm is not None:
            per_head = self.spec.qk_norm == "head"
            heads_or_rows = flat.reshape(-1, size) if per_head else flat
            kernels.rms_norm(heads_or_rows, norm, self.norm.eps, heads_or_rows)
        return flat.reshape(rows, heads, size)
