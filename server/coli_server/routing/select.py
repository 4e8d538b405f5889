"""Choose the experts of each token under a routing policy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coli_server.routing.errors import RoutingError, ScoreError
from coli_server.routing.policy import RoutePolicy

Float32 = NDArray[np.float32]
Spans = float | NDArray[np.floating[Any]]

_NO_SPANS: Final = np.empty(0, np.float64)


# Not frozen, as one is made for every layer of every token, and a frozen one takes twice as long.
@dataclass(slots=True)
class Selection:
    """The chosen experts, best true rank first, and what choosing them cost.

    experts    int32 [tokens, k], distinct in each row
    weights    float32 [tokens, k], ready to multiply the experts' outputs with
    swaps      int64 [tokens]: chosen experts that the stock router would not have taken
    agree      int64 [tokens]: k - swaps
    kl         float64 [tokens], nats, never negative, 0 where nothing was swapped
    mass_kept  float64 [tokens]: gate mass of the chosen, after alpha, over that of the stock choice
    true       int32 [tokens, k]: what the stock router takes, in rank order

    With `agree=False` in the policy, kl and mass_kept are not computed and hold NaN.
    """

    experts: NDArray[np.int32]
    weights: Float32
    swaps: NDArray[np.int64]
    agree: NDArray[np.int64]
    kl: NDArray[np.float64]
    mass_kept: NDArray[np.float64]
    true: NDArray[np.int32]


def select(
    scores: Float32,
    weights: Float32,
    resident: NDArray[np.bool_],
    k: int,
    policy: RoutePolicy,
    *,
    logits: Float32 | None = None,
    span: Spans | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
) -> Selection:
    """Choose k experts for each token.

    scores    float32 [tokens, experts]: the ranking; -inf marks an expert that the family masks
    weights   float32 [tokens, experts]: the gate mass, before any renormalisation
    resident  bool [experts] or [tokens, experts]
    logits    float32 [tokens, experts], softmax families only: what cache-prior adds its bonus to;
              without it the bonus goes to the scores
    span      float64 or float32, one number or [tokens]: the running mean of max - min of those logits
              (or scores) over unmasked experts; without it each token's own
    renormalize, scale
              the family's rule for weights: divide by (their sum + 1e-20), then multiply by scale

    The ranking is by score, ties to the lower id. Weights are computed in float64 and rounded once, so
    they are the exact values to half a unit in the last place whatever the order of a reference's float32
    sum, and plain gate masses come back bit for bit. Every policy ends in the same arithmetic in the
    same order: an unchanged choice has unchanged bytes.

    Raises ScoreError for a token whose scores, masses or logits are not finite or that has fewer than
    k unmasked experts; RoutingError for arrays that do not fit together.
    """
    if scores.ndim != 2 or scores.dtype != np.float32:
        raise RoutingError(f"scores are {scores.dtype} {scores.shape}: float32 [tokens, experts] is needed")
    tokens, experts = scores.shape
    if not 0 < k <= experts:
        raise RoutingError(f"k is {k}: it must be from 1 to the number of experts, {experts}")
    _check("weights", weights, scores)
    if logits is None:
        logits = scores
    else:
        _check("logits", logits, scores)
    if resident.ndim == 1:
        resident = resident[None]
    if resident.dtype != np.bool_ or resident.shape not in ((1, experts), scores.shape):
        raise RoutingError(
            f"resident is {resident.dtype} {resident.shape}: bool [experts] or [tokens, experts] is needed"
        )
    spans = _NO_SPANS if span is None else _as_spans(span, tokens)

    ids = np.empty((2, tokens, k), np.int32)
    chosen_weights = np.empty((tokens, k), np.float32)
    counts = np.empty((2, tokens), np.int64)
    meters = np.empty((2, tokens), np.float64)
    kernels = compiled()
    failed = kernels.route(
        np.ascontiguousarray(scores),
        np.ascontiguousarray(weights),
        np.ascontiguousarray(logits),
        np.ascontiguousarray(resident),
        spans,
        k,
        kernels.MODES[policy.mode],
        min(policy.j, k),
        min(policy.m, experts),
        policy.p,
        policy.alpha,
        policy.lam,
        bool(renormalize),
        float(scale),
        policy.agree is not False,
        ids,
        chosen_weights,
        counts,
        meters,
    )
    if failed >= 0:
        raise _refusal(failed, scores, weights, logits, spans, k)
    return Selection(ids[0], chosen_weights, counts[0], counts[1], meters[0], meters[1], ids[1])


@functools.cache
def compiled() -> ModuleType:
    """Import the compiled part late: numba fixes its code cache folder when it meets the functions."""
    from coli_server.routing import kernels

    return kernels


def _check(name: str, array: Float32, scores: Float32) -> None:
    if array.shape != scores.shape or array.dtype != np.float32:
        raise RoutingError(f"{name} are {array.dtype} {array.shape}: float32 {scores.shape} is needed")


def _as_spans(span: Spans, tokens: int) -> NDArray[np.float64]:
    spans = np.atleast_1d(np.asarray(span, np.float64))
    if spans.shape not in ((1,), (tokens,)):
        raise RoutingError(f"span has the shape {spans.shape}: one number or [{tokens}] is needed")
    return np.ascontiguousarray(spans)


def _refusal(
    token: int, scores: Float32, weights: Float32, logits: Float32, spans: NDArray[np.float64], k: int
) -> ScoreError:
    """Say what is wrong with a token that the kernel refused."""
    unmasked = scores[token] != -np.inf
    available = int(unmasked.sum())
    if available < k:
        return ScoreError(
            f"token row {token} has {available} unmasked experts: at least K={k} are needed", token
        )
    for name, values in (("score", scores), ("gate mass", weights), ("logit", logits)):
        broken = np.flatnonzero(unmasked & ~np.isfinite(values[token]))
        if broken.size:
            expert = int(broken[0])
            return ScoreError(
                f"the router's {name} of expert {expert} is {float(values[token, expert])} "
                f"in token row {token}: it must be a finite number",
                token,
                expert,
            )
    span = float(spans[min(token, spans.size - 1)])
    return ScoreError(f"the span is {span} in token row {token}: it must be finite and not negative", token)
