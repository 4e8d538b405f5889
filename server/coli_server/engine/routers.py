"""From router logits to ranking scores and gate masses, family by family."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coli_server.engine.spec import Router

F32 = NDArray[np.float32]


def score(router: Router, logits: F32, correction: F32 | None) -> tuple[F32, F32]:
    """Ranking scores and gate masses, both float32 [tokens, experts], of router `logits`.

    An expert outside the chosen groups has score -inf and mass 0. `correction` is the bias on the
    scores, float32 [experts]. Sparsemixer: see `_sparsemixer`.
    """
    scores, mass = np.empty_like(logits), np.empty_like(logits)
    if router.scoring == "softmax":
        _softmax(logits, scores, mass)
    elif router.scoring == "sparsemixer":
        scores[:] = logits
        _sparsemixer(logits, np.float32(2 * router.jitter), mass)
    else:
        _sigmoid(logits, correction if correction is not None else _NO_BIAS, scores, mass)
    if router.groups > 1:
        _mask_groups(scores, mass, router.groups, router.topk_groups, router.group_score == "top2")
    return scores, mass


_NO_BIAS = np.zeros(0, np.float32)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _softmax(logits: F32, scores: F32, mass: F32) -> None:
    for t in range(logits.shape[0]):
        top = logits[t, 0]
        for e in range(1, logits.shape[1]):
            top = max(top, logits[t, e])
        total = np.float32(0)
        for e in range(logits.shape[1]):
            mass[t, e] = np.exp(logits[t, e] - top)
            total += mass[t, e]
        for e in range(logits.shape[1]):
            mass[t, e] /= total
            scores[t, e] = mass[t, e]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sigmoid(logits: F32, correction: F32, scores: F32, mass: F32) -> None:
    one = np.float32(1)
    for t in range(logits.shape[0]):
        for e in range(logits.shape[1]):
            mass[t, e] = one / (one + np.exp(-logits[t, e]))
            scores[t, e] = mass[t, e] + (correction[e] if len(correction) else np.float32(0))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sparsemixer(logits: F32, tolerance: np.float32, mass: F32) -> None:
    """Gate masses of SparseMixer-v2 (arXiv:2409.12136), which takes two experts one after the other.

    The first is the expert with the highest logit, and its mass is its share in a softmax over its near
    ties: the experts e with (top - e) / max(|e|, top) <= tolerance. The second is found in the same way
    among the others, and only then is the first out of the race. Every other expert may come in as a
    substitute, so it needs a mass too: its share exp(e) in the second softmax, as if the near-tie
    threshold were lifted for it alone. So stock weights are exact, a near tie of the second has just
    its own share, and a substitute outside the threshold has a small weight but never none.
    """
    for t in range(logits.shape[0]):
        row = logits[t]
        first = np.argmax(row)
        total = np.float32(0)
        for e in range(len(row)):
            if _near_tie(row[e], row[first], tolerance):
                total += np.exp(row[e] - row[first])
        second = -1
        for e in range(len(row)):
            if e != first and (second < 0 or row[e] > row[second]):
                second = e
        rest = np.float32(0)
        for e in range(len(row)):
            if e != first and _near_tie(row[e], row[second], tolerance):
                rest += np.exp(row[e] - row[second])
        for e in range(len(row)):
            mass[t, e] = np.exp(row[e] - row[second]) / rest
        mass[t, first] = np.float32(1) / total


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _near_tie(logit: np.float32, top: np.float32, tolerance: np.float32) -> bool:
    scale = max(abs(logit), top)
    return scale == 0 or not (top - logit) / scale > tolerance


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mask_groups(scores: F32, mass: F32, groups: int, keep: int, top2: bool) -> None:
    size = scores.shape[1] // groups
    value = np.empty(groups, np.float32)
    for t in range(scores.shape[0]):
        for g in range(groups):
            best, second = np.float32(-np.inf), np.float32(-np.inf)
            for e in range(g * size, (g + 1) * size):
                s = scores[t, e]
                if np.isnan(s):  # a NaN must reach the selection, which refuses it
                    best, second = s, s
                    break
                if s > best:
                    best, second = s, best
                elif s > second:
                    second = s
            value[g] = best + second if top2 and size > 1 else best
        for g in range(groups):
            rank = 0  # groups that come before this one; ties to the lower group
            for other in range(groups):
                if value[other] > value[g] or (value[other] == value[g] and other < g):
                    rank += 1
            if rank >= keep and not np.isnan(value[g]):
                for e in range(g * size, (g + 1) * size):
                    scores[t, e] = -np.inf
                    mass[t, e] = 0
