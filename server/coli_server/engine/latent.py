"""Multi-head latent attention (arXiv:2405.04434) in its absorbed form.

What is cached of a token is its normalised latent and one rotated key that all heads share. The matrices
that would expand the latent into every head's key and value are applied to the query and to the mixed latents
instead, so keys and values are never formed: attention has one key/value head, whose value is in its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.families.common import TensorNames
from coli_server.engine.kernels import Kind
from coli_server.engine.norms import Norm
from coli_server.engine.sparse import SparseIndexer
from coli_server.engine.spec import LatentAttention, NormSpec
from coli_server.engine.step import Step
from coli_server.engine.weights import Matrix, Weights

F32 = NDArray[np.float32]
Stored = NDArray[Any]  # bfloat16 or float16 bits in uint16, or float32
Angles = tuple[F32, F32]  # cosines and sines, each [rows, rotary dim / 2]


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """The weights of one layer's latent attention.

    `q` makes queries, from the hidden state or, behind `q_a` and `q_norm`, from its low-rank form.
    `absorb_key` [heads, kv_rank, nope_dim] takes a query to the latent, `absorb_value` [heads, value_dim,
    kv_rank] a mixed latent to the head's output; both in the stored type.
    """

    spec: LatentAttention
    layer: int
    q_a: Matrix | None
    q_norm: Norm | None
    q: Matrix
    kv_a: Matrix
    kv_norm: Norm
    absorb_key: Stored
    absorb_value: Stored
    kind: Kind
    out: Matrix
    indexer: SparseIndexer | None

    @classmethod
    def load(
        cls, weights: Weights, names: TensorNames, spec: LatentAttention, layer: int, hidden: int
    ) -> LatentBlock:
        prefix, norm = names.layer.format(layer=layer), NormSpec("rms", spec.norm_eps)
        queries = spec.heads * (spec.nope_dim + spec.rope_dim)
        q_a = q_norm = None
        if spec.q_rank is None:
            q = weights.matrix([prefix + names.q], [queries], hidden)
        else:
            q_a = weights.matrix([prefix + names.q_a], [spec.q_rank], hidden, bias=spec.bias)
            q_norm = Norm.load(weights, prefix + names.q_a_norm, spec.q_rank, norm)
            q = weights.matrix([prefix + names.q_b], [queries], spec.q_rank)
        absorb_key, absorb_value, kind = _absorbed(weights, prefix + names.kv_b, spec)
        indexer = None
        if spec.indexer is not None and not spec.indexer.shared:
            indexer = SparseIndexer.load(weights, prefix + names.indexer, spec, layer, hidden)
        return cls(
            spec,
            layer,
            q_a,
            q_norm,
            q,
            weights.matrix([prefix + names.kv_a], [spec.kv_rank + spec.rope_dim], hidden, bias=spec.bias),
            Norm.load(weights, prefix + names.kv_a_norm, spec.kv_rank, norm),
            absorb_key,
            absorb_value,
            kind,
            weights.matrix([prefix + names.out], [hidden], spec.heads * spec.value_dim, bias=spec.bias),
            indexer,
        )

    def forward(self, x: F32, step: Step, angles: Angles | None) -> F32:
        """Attention of every row of `step`: float32 [rows, hidden] -> [rows, hidden].

        Writes the rows' latents, and the indexer's keys, into their sequences' caches.
        """
        spec, rows = self.spec, len(x)
        assert angles is not None
        low_rank = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q = self._queries(low_rank, angles)
        latent = self._latents(x, angles)
        if self.indexer is not None:
            self.indexer.select(x, low_rank, step, angles)
        mixed = np.empty((rows, spec.heads, spec.kv_rank), np.float32)
        for i, span in enumerate(step.spans):
            at, end, start = step.first[i], step.first[i + 1], step.starts[i]
            keys = span.sequence.kv.keys[self.layer]
            keys[start : start + end - at, 0] = latent[at:end]
            kernels.attention(
                q[at:end], keys, keys[:, :, : spec.kv_rank], step.positions[at:end], spec.scale,
                allowed=step.selected[i] if spec.indexer else None, out=mixed[at:end],
            )  # fmt: skip
        return self.out(self._heads_out(mixed))

    def _queries(self, low_rank: F32, angles: Angles) -> F32:
        """Queries that meet the cache as it is: float32 [rows, heads, kv_rank + rope_dim]."""
        spec, rows = self.spec, len(low_rank)
        q = self.q(low_rank).reshape(rows, spec.heads, spec.nope_dim + spec.rope_dim)
        plain = np.ascontiguousarray(q[:, :, : spec.nope_dim].transpose(1, 0, 2))
        turned = np.ascontiguousarray(q[:, :, spec.nope_dim :])
        out = np.empty((rows, spec.heads, spec.kv_rank + spec.rope_dim), np.float32)
        out[:, :, : spec.kv_rank] = kernels.linear_heads(plain, self.absorb_key, self.kind).transpose(1, 0, 2)
        out[:, :, spec.kv_rank :] = kernels.rope(turned, *angles, spec.rope.interleaved)
        return out

    def _latents(self, x: F32, angles: Angles) -> F32:
        """What is cached of the rows: latent and shared key, float32 [rows, kv_rank + rope_dim]."""
        spec, rows = self.spec, len(x)
        out = self.kv_a(x)
        turned = np.ascontiguousarray(out[:, spec.kv_rank :]).reshape(rows, 1, spec.rope_dim)
        out[:, : spec.kv_rank] = self.kv_norm(np.ascontiguousarray(out[:, : spec.kv_rank]))
        out[:, spec.kv_rank :] = kernels.rope(turned, *angles, spec.rope.interleaved)[:, 0]
        return out

    def _heads_out(self, mixed: F32) -> F32:
        """Outputs of all heads side by side: float32 [rows, heads, kv_rank] -> [rows, heads * value_dim]."""
        by_head = np.ascontiguousarray(mixed.transpose(1, 0, 2))
        values = kernels.linear_heads(by_head, self.absorb_value, self.kind)
        return np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(len(mixed), -1)


def _absorbed(weights: Weights, name: str, spec: LatentAttention) -> tuple[Stored, Stored, Kind]:
    """The two halves of every head of `name` (kv_b_proj), the key's transposed, and their stored type."""
    each = spec.nope_dim + spec.value_dim
    both = weights.matrix([name], [spec.heads * each], spec.kv_rank)
    heads = both.data.reshape(spec.heads, each, spec.kv_rank)
    if not both.data.flags.c_contiguous:  # stand-ins of a check of headers, which hold no memory
        return heads, heads, both.kind
    key: Stored = np.ascontiguousarray(heads[:, : spec.nope_dim].transpose(0, 2, 1))
    value: Stored = np.ascontiguousarray(heads[:, spec.nope_dim :])
    return key, value, both.kind
