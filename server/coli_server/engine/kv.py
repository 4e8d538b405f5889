"""The key/value cache of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.spec import Attention, GroupedQueryAttention

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvWidths:
    """What one layer keeps of a token: `heads` x (`key` + `value`) floats, plus `index` for a sparse indexer.

    Latent attention keeps one head whose value is a prefix of its key, so `value` is 0 there.
    """

    heads: int
    key: int
    value: int
    index: int = 0

    @property
    def floats(self) -> int:
        return self.heads * (self.key + self.value) + self.index


def kv_widths(attention: Attention) -> KvWidths:
    """The cache widths that an attention block needs."""
    if isinstance(attention, GroupedQueryAttention):
        return KvWidths(attention.kv_heads, attention.head_dim, attention.head_dim)
    index = attention.indexer.head_dim if attention.indexer and not attention.indexer.shared else 0
    return KvWidths(1, attention.kv_rank + attention.rope_dim, 0, index)


def kv_bytes_per_token(widths: Sequence[KvWidths]) -> int:
    """Bytes that one token occupies in all layers (float32)."""
    return 4 * sum(width.floats for width in widths)


class KvCache:
    """Keys and values of one sequence, float32, `capacity` tokens in every layer.

    Attributes per layer: `keys[i]` [capacity, heads, key], `values[i]` [capacity, heads, value],
    `index[i]` [capacity, index]. Memory is touched, and so paid for, only as tokens are written. `bases`:
    where keys and values of every layer begin, int64 [layers, 2].
    `length` tokens are valid; the first `stock` of them were made under stock routing from the start of
    the sequence, so any request may reuse them; the rest belongs to the dialogue that `origin` names.
    """

    def __init__(self, widths: Sequence[KvWidths], capacity: int) -> None:
        self.widths = tuple(widths)
        self.capacity = capacity
        self.keys = [np.empty((capacity, w.heads, w.key), np.float32) for w in widths]
        self.values = [np.empty((capacity, w.heads, w.value), np.float32) for w in widths]
        self.index = [np.empty((capacity, w.index), np.float32) for w in widths]
        caches = zip(self.keys, self.values, strict=True)
        self.bases = np.array([(k.ctypes.data, v.ctypes.data) for k, v in caches], np.int64)
        self.ids: list[int] = []
        self.stock = 0
        self.origin: object = None

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, touched or not."""
        return kv_bytes_per_token(self.widths) * self.capacity

    def append(self, ids: Sequence[int], *, stock: bool) -> None:
        """Declare the rows written behind `length` valid. `stock`: they were routed by the stock router."""
        if stock and self.stock == self.length:
            self.stock += len(ids)
        self.ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        del self.ids[length:]
        self.stock = min(self.stock, length)

    def resized(self, capacity: int) -> KvCache:
        """A cache of another capacity with the same tokens (at most `capacity` of them)."""
        if capacity == self.capacity:
            return self
        other = KvCache(self.widths, capacity)
        keep = min(self.length, capacity)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values), (self.index, other.index)):
            for source, target in zip(mine, theirs, strict=True):
                target[:keep] = source[:keep]
        other.ids = self.ids[:keep]
        other.stock, other.origin = min(self.stock, keep), self.origin
        return other
