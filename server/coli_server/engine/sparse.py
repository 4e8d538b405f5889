"""The indexer of sparse attention (DeepSeek-V3.2, GLM-5): a light scorer of what a position attends to.

A position's score for an earlier one is sum over heads of weight * relu(query . key * scale); the `topk` best
earlier positions, itself included, are selected, ties to the earlier one. A position that has no more than
`topk` to choose from attends to all of them, which is full attention to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.kernels import Kind
from coli_server.engine.norms import Norm
from coli_server.engine.spec import LatentAttention, NormSpec
from coli_server.engine.step import Step
from coli_server.engine.weights import Matrix, Weights

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_KEY_NORM = NormSpec("layer", 1e-6)
SCORES_AT_ONCE = 1 << 22
"""Floats of head scores held at a time: 16 MiB, whatever the context."""


@dataclass(frozen=True, slots=True)
class SparseIndexer:
    """The weights of one layer's indexer; its keys lie in the KV cache's `index` of that layer."""

    heads: int
    head_dim: int
    topk: int
    layer: int
    interleaved: bool
    q: Matrix
    k: Matrix
    k_norm: Norm
    weights: Matrix

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, spec: LatentAttention, layer: int, hidden: int
    ) -> SparseIndexer:
        """Read the indexer whose tensors' names begin with `prefix`."""
        assert spec.indexer is not None
        assert spec.q_rank is not None
        heads, size = spec.indexer.heads, spec.indexer.head_dim
        return cls(
            heads,
            size,
            spec.indexer.topk,
            layer,
            spec.rope.interleaved,
            weights.matrix([prefix + "wq_b"], [heads * size], spec.q_rank, exact=True),
            weights.matrix([prefix + "wk"], [size], hidden, exact=True),
            Norm.load(weights, prefix + "k_norm", size, _KEY_NORM),
            weights.matrix([prefix + "weights_proj"], [heads], hidden, exact=True),
        )

    def select(self, x: F32, low_rank: F32, step: Step, angles: tuple[F32, F32]) -> None:
        """Set `step.selected` for this layer and those that share its selection; caches the rows' keys.

        x float32 [rows, hidden]; low_rank float32 [rows, q_rank], the queries' normalised low-rank form.
        """
        rows = len(x)
        k = self.k_norm(self.k(x)).reshape(rows, 1, self.head_dim)
        kernels.rope(k, *angles, self.interleaved)
        q = self.q(low_rank).reshape(rows, self.heads, self.head_dim)
        kernels.rope(q, *angles, self.interleaved)
        weights = self.weights(x) * np.float32(self.heads**-0.5)
        for i, span in enumerate(step.spans):
            at, end, start = step.first[i], step.first[i + 1], step.starts[i]
            keys = span.sequence.kv.index[self.layer]
            keys[start : start + end - at] = k[at:end, 0]
            step.selected[i] = None  # all positions, where no row has more than it may choose
            if start + end - at > self.topk:
                step.selected[i] = self._choose(
                    q[at:end], keys[: start + end - at], weights[at:end], step.positions[at:end]
                )

    def _choose(self, q: F32, keys: F32, weights: F32, positions: I32) -> I32:
        """Selected positions of every row in rising order, padded by -1: int32 [rows, topk]."""
        rows, seen = len(q), len(keys)
        chosen = np.full((rows, self.topk), -1, np.int32)
        block = max(1, SCORES_AT_ONCE // (self.heads * seen))
        for at in range(0, rows, block):
            part = slice(at, min(rows, at + block))
            dots = kernels.linear(q[part].reshape(-1, self.head_dim), keys, Kind.F32)
            dots = dots.reshape(-1, self.heads, seen)
            choose(dots, weights[part], positions[part], np.float32(self.head_dim**-0.5), chosen[part])
        return chosen


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def choose(dots: F32, weights: F32, positions: I32, scale: np.float32, chosen: I32) -> None:
    """Fill `chosen` [rows, topk], which holds -1, with the best positions of every row in rising order.

    dots float32 [rows, heads, positions], weights float32 [rows, heads], positions int32 [rows].
    """
    rows, heads, _ = dots.shape
    topk = chosen.shape[1]
    for t in range(rows):
        count = positions[t] + 1
        if count <= topk:
            for s in range(count):
                chosen[t, s] = s
            continue
        scores = np.zeros(count, np.float32)
        for h in range(heads):
            weight = weights[t, h]
            for s in range(count):
                scores[s] += weight * max(dots[t, h, s] * scale, np.float32(0))
        bar = np.partition(scores, count - topk)[count - topk]  # the least score that is selected
        ties = topk
        for s in range(count):
            if scores[s] > bar:
                ties -= 1
        at = 0
        for s in range(count):
            if scores[s] > bar or (scores[s] == bar and ties > 0):
                if scores[s] == bar:
                    ties -= 1
                chosen[t, at] = s
                at += 1
