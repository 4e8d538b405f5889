"""Sorting (token, chosen expert) pairs by expert, so that each expert's weights are read once a step."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def group_pairs(chosen: I32, state: NDArray[np.uint8], found: I64) -> tuple[I32, I32, I32]:
    """Group the pairs of `chosen`, int32 [tokens, k]; pair p is (token p // k, rank p % k).

    Counts where they were found: `found` int64 [tokens, 3] += lookups by `state`, uint8 [experts] (absent,
    LRU, pinned).

    Returns the pairs ordered by expert, int32 [tokens * k]; where each expert's pairs begin in it, int32
    [experts + 1]; and the distinct experts in order of first choice: best rank of the first token first,
    which is the order in which the cache is touched.
    """
    tokens, k = chosen.shape
    experts = len(state)
    starts = np.zeros(experts + 1, np.int32)
    wanted = np.empty(min(experts, tokens * k), np.int32)
    count = 0
    for t in range(tokens):
        for r in range(k):
            e = chosen[t, r]
            found[t, state[e]] += 1
            if starts[e + 1] == 0:
                wanted[count] = e
                count += 1
            starts[e + 1] += 1
    for e in range(experts):
        starts[e + 1] += starts[e]
    order = np.empty(tokens * k, np.int32)
    fill = starts[:-1].copy()
    for t in range(tokens):
        for r in range(k):
            e = chosen[t, r]
            order[fill[e]] = t * k + r
            fill[e] += 1
    return order, starts, wanted[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_groups(order: I32, starts: I32, experts: I32, k: int) -> tuple[I32, I32, I32]:
    """The pairs of some `experts` (int32 [groups]), one group an expert.

    Returns group starts int32 [groups + 1], and for each pair its token and its own number, int32 [pairs].
    """
    group_start = np.zeros(len(experts) + 1, np.int32)
    for g in range(len(experts)):
        e = experts[g]
        group_start[g + 1] = group_start[g] + starts[e + 1] - starts[e]
    pairs = np.empty(group_start[-1], np.int32)
    tokens = np.empty(group_start[-1], np.int32)
    for g in range(len(experts)):
        first = starts[experts[g]]
        for i in range(group_start[g + 1] - group_start[g]):
            pair = order[first + i]
            pairs[group_start[g] + i] = pair
            tokens[group_start[g] + i] = pair // k
    return group_start, tokens, pairs
