"""Compiled selection of experts. Import this module only once the kernel cache folder is set.

A ranking is a max-heap of int64 keys: the score's bits in an order that integers share, above the
complement of the expert's id. So one comparison ranks by score with ties to the lower id, keys are
unique, and only as much of the ranking is sorted as the policy looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

OFF, MAX_RANK, CACHE_PRIOR = 0, 1, 2
MODES = {"off": OFF, "max-rank": MAX_RANK, "cache-prior": CACHE_PRIOR}

_KL_FLOOR = 1e-12
_RENORMALIZE_EPSILON = 1e-20
_ID_BITS = 32
_LOW = (1 << _ID_BITS) - 1
_LARGEST_ID = (1 << 31) - 1

Array = np.ndarray[Any, np.dtype[Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy")(function))


@_compiled
def _expert(key: int) -> int:
    return _LARGEST_ID - (key & _LOW)


@_compiled
def _sift(heap: Array, root: int, n: int) -> None:
    """Let the key at `root` sink to its place among the first n."""
    key = heap[root]
    child = 2 * root + 1
    while child < n:
        if child + 1 < n and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= key:
            break
        heap[root] = heap[child]
        root = child
        child = 2 * root + 1
    heap[root] = key


@_compiled
def _heapify(heap: Array, n: int) -> None:
    for root in range(n // 2 - 1, -1, -1):
        _sift(heap, root, n)


@_compiled
def _pop(heap: Array, n: int) -> int:
    """Take the best of n keys; the caller counts n down."""
    best = heap[0]
    heap[0] = heap[n - 1]
    _sift(heap, 0, n - 1)
    return best  # type: ignore[no-any-return]


@_compiled
def _rank(scores: Array, bits: Array, weights: Array, heap: Array) -> int:
    """Put the keys of the unmasked experts of one token into `heap`; return how many, -1 if not finite."""
    n = 0
    for e in range(scores.shape[0]):
        score = scores[e]
        if score == -np.inf:
            continue
        if not (np.isfinite(score) and np.isfinite(weights[e])):
            return -1
        order = np.int64(bits[e])
        if score == 0.0:
            order = np.int64(0)  # -0.0 and 0.0 tie
        elif order < 0:
            order ^= np.int64(0x7FFFFFFF)  # a more negative float has larger bits
        heap[n] = (order << _ID_BITS) | (_LARGEST_ID - e)
        n += 1
    _heapify(heap, n)
    return n


@_compiled
def _max_rank(
    scratch: Array, n: int, weights: Array, resident: Array, k: int, j: int, m: int, p: float
) -> None:
    """Choose the top j, then residents inside the window, then the best of the rest.

    Ranks beyond k are taken off the heap (n keys are left on it) only as the window is searched.
    """
    heap, ranked, chosen = scratch[0], scratch[1], scratch[2]
    mass = 0.0
    mass_wanted = 0.0
    if p > 0.0:
        for i in range(k):
            mass += weights[_expert(ranked[i])]
        mass_wanted = mass
        for i in range(n):
            mass_wanted += weights[_expert(heap[i])]
        mass_wanted *= p
    found = j
    rank = j
    while found < k:
        if rank >= k:
            if n == 0 or (mass >= mass_wanted if p > 0.0 else rank >= m):
                break
            ranked[rank] = _pop(heap, n)
            n -= 1
            mass += weights[_expert(ranked[rank])]
        if resident[_expert(ranked[rank])]:
            chosen[found] = ranked[rank]
            found += 1
        rank += 1
    rank = j
    while found < k:  # the window holds at least k experts: what is still missing lies inside it
        if not resident[_expert(ranked[rank])]:
            chosen[found] = ranked[rank]
            found += 1
        rank += 1


@_compiled
def _cache_prior(scratch: Array, n: int, z: Array, resident: Array, k: int, j: int, bonus: float) -> None:
    """Choose the top j, then merge residents (z + bonus) with the others (z), both in rank order.

    One bonus for all residents does not change the order among them, so merging the two rankings gives
    the top k of z' = z + bonus * resident. A merge also keeps the order of the ranking where rounding
    made scores tie whose logits differ.
    """
    heap, ranked, chosen, here, away = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    n_here = 0
    n_away = 0
    for i in range(j, k + n):
        key = ranked[i] if i < k else heap[i - k]
        if resident[_expert(key)]:
            here[n_here] = key
            n_here += 1
        else:
            away[n_away] = key
            n_away += 1
    _heapify(here, n_here)
    _heapify(away, n_away)
    for i in range(j, k):
        take_here = n_away == 0
        if n_here > 0 and n_away > 0:
            boosted = z[_expert(here[0])] + bonus
            plain = z[_expert(away[0])]
            take_here = boosted > plain or (boosted == plain and here[0] > away[0])
        if take_here:
            chosen[i] = _pop(here, n_here)
            n_here -= 1
        else:
            chosen[i] = _pop(away, n_away)
            n_away -= 1


@_compiled
def _spread(scores: Array, z: Array) -> float:
    """Return max(z) - min(z) over the unmasked experts of one token; NaN where a logit is not finite."""
    low = np.inf
    high = -np.inf
    for e in range(scores.shape[0]):
        if scores[e] == -np.inf:
            continue
        if not np.isfinite(z[e]):
            return np.nan
        low = min(low, np.float64(z[e]))
        high = max(high, np.float64(z[e]))
    return high - low


@_compiled
def _put_in_rank_order(chosen: Array, k: int) -> None:
    for i in range(1, k):
        key = chosen[i]
        at = i
        while at > 0 and chosen[at - 1] < key:
            chosen[at] = chosen[at - 1]
            at -= 1
        chosen[at] = key


@_compiled
def _weigh(
    scratch: Array,
    weights: Array,
    k: int,
    alpha: float,
    renormalize: bool,
    scale: float,
    experts_out: Array,
    weights_out: Array,
) -> int:
    """Write ids and weights of the chosen; return how many are substitutes.

    Arithmetic is float64 over float32 inputs, in rank order, and rounds once.
    """
    ranked, chosen = scratch[1], scratch[2]
    swaps = 0
    total = 0.0
    for i in range(k):
        expert = _expert(chosen[i])
        mass = np.float64(weights[expert])
        if chosen[i] < ranked[k - 1]:
            swaps += 1
            mass *= alpha
        total += mass
        experts_out[i] = expert
    divisor = total + _RENORMALIZE_EPSILON if renormalize else 1.0
    for i in range(k):
        mass = np.float64(weights[experts_out[i]])
        if chosen[i] < ranked[k - 1]:
            mass *= alpha
        weights_out[i] = mass / divisor * scale
    return swaps


@_compiled
def _divergence(scratch: Array, weights: Array, k: int, alpha: float) -> tuple[float, float]:
    """Return (KL in nats, mass kept) of one token in which something was substituted."""
    ranked, chosen = scratch[1], scratch[2]
    true_mass = 0.0
    chosen_mass = 0.0
    for i in range(k):
        true_mass += weights[_expert(ranked[i])]
        mass = np.float64(weights[_expert(chosen[i])])
        chosen_mass += mass if chosen[i] >= ranked[k - 1] else mass * alpha
    if not true_mass > 0.0:
        return 0.0, 1.0  # the stock router gives these experts no weight at all: nothing was lost
    kl = 0.0
    at = 0
    for i in range(k):
        mass = np.float64(weights[_expert(ranked[i])])
        kept = at < k and chosen[at] == ranked[i]
        if kept:
            at += 1
        if mass > 0.0:
            after = mass / chosen_mass if kept else 0.0
            before = mass / true_mass
            kl += before * np.log(before / max(after, _KL_FLOOR))
    return max(kl, 0.0), chosen_mass / true_mass


@_compiled
def route(
    scores: Array,
    weights: Array,
    z: Array,
    resident: Array,
    spans: Array,
    k: int,
    mode: int,
    j: int,
    m: int,
    p: float,
    alpha: float,
    lam: float,
    renormalize: bool,
    scale: float,
    meters: bool,
    ids_out: Array,
    weights_out: Array,
    counts_out: Array,
    meters_out: Array,
) -> int:
    """Route every token; return -1, or the row of the first token that cannot be routed.

    scores, weights, z   float32 [tokens, experts]
    resident             bool [1 or tokens, experts]
    spans                float64 [0, 1 or tokens]; 0 = each token's own
    ids_out              int32 [2, tokens, k] in rank order: chosen, true
    weights_out          float32 [tokens, k], of the chosen
    counts_out           int64 [2, tokens]: swaps, agree
    meters_out           float64 [2, tokens]: kl, mass kept; NaN without `meters`
    """
    tokens, experts = scores.shape
    bits = scores.view(np.int32)
    scratch = np.empty((5, experts), np.int64)
    heap, ranked, chosen = scratch[0], scratch[1], scratch[2]
    for t in range(tokens):
        n = _rank(scores[t], bits[t], weights[t], heap)
        if n < k:
            return t
        for i in range(k):
            ranked[i] = _pop(heap, n)
            chosen[i] = ranked[i]
            ids_out[1, t, i] = _expert(ranked[i])
            n -= 1
        if mode == MAX_RANK:
            row = resident[t if resident.shape[0] > 1 else 0]
            _max_rank(scratch, n, weights[t], row, k, j, m, p)
        elif mode == CACHE_PRIOR:
            span = _spread(scores[t], z[t])
            if spans.shape[0] > 0 and not np.isnan(span):
                span = spans[t if spans.shape[0] > 1 else 0]
            if not (np.isfinite(span) and span >= 0.0):
                return t
            if lam * span > 0.0:
                row = resident[t if resident.shape[0] > 1 else 0]
                _cache_prior(scratch, n, z[t], row, k, j, lam * span)
        _put_in_rank_order(chosen, k)
        swaps = _weigh(scratch, weights[t], k, alpha, renormalize, scale, ids_out[0, t], weights_out[t])
        counts_out[0, t] = swaps
        counts_out[1, t] = k - swaps
        if not meters:
            meters_out[:, t] = np.nan
        elif swaps == 0:
            meters_out[0, t] = 0.0
            meters_out[1, t] = 1.0
        else:
            meters_out[0, t], meters_out[1, t] = _divergence(scratch, weights[t], k, alpha)
    return -1


@_compiled
def touch(stamps: Array, experts: Array, capacity: int) -> None:
    """Touch expert ids [k] in an LRU of one layer: int64 [experts], 0 = absent, else larger = more recent."""
    now = np.int64(0)
    held = 0
    for e in range(stamps.shape[0]):
        if stamps[e] > 0:
            held += 1
            now = max(now, stamps[e])
    for i in range(experts.shape[0]):
        if stamps[experts[i]] == 0:
            if held == capacity:
                oldest = -1
                for e in range(stamps.shape[0]):
                    if stamps[e] > 0 and (oldest < 0 or stamps[e] < stamps[oldest]):
                        oldest = e
                stamps[oldest] = 0
            else:
                held += 1
        now += 1
        stamps[experts[i]] = now


@_compiled
def observe_spans(
    scores: Array, z: Array, totals: Array, counts: Array, layer: int, spans_out: Array
) -> None:
    """Add each token's spread to one layer's running mean; write the mean that the token itself sees."""
    for t in range(scores.shape[0]):
        totals[layer] += _spread(scores[t], z[t])
        counts[layer] += 1
        spans_out[t] = totals[layer] / counts[layer]
