"""From runs to figures: totals over windows, and how sure they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.bench.decode import WindowRun
from coli_server.engine import figures as ratios
from coli_server.engine.figures import Counters

F64 = NDArray[np.float64]
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % confidence interval, by bootstrap over windows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quality:
    """What a policy costs, against the stock router on the same tokens.

    perplexity      exp of total nats / total tokens
    increase        percent: of perplexity over the stock one
    kl              nats: mean divergence of the next-token distribution from the stock one
    top1            percent: tokens whose likeliest successor is the stock one
    """

    tokens: int
    perplexity: Interval
    increase: Interval
    kl: Interval
    top1: Interval


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a policy did to the cache. Percentages are of lookups; `tok_s` is None where nothing was timed."""

    tok_s: Interval | None
    hit_pct: float
    pin_pct: float
    lru_pct: float
    bytes_per_token: float | None
    swap_pct: float
    agree_pct: float
    route_kl: float


def quality(runs: Sequence[WindowRun]) -> Quality:
    """Figures of one arm's windows."""
    scores = [run.scores for run in runs]
    sums = np.array(
        [[len(s.nll), s.nll.sum(), s.stock_nll.sum(), s.kl.sum(), s.same.sum()] for s in scores], np.float64
    )
    return Quality(
        int(sums[:, 0].sum()),
        bootstrap(sums, lambda s: np.exp(s[..., 1] / s[..., 0])),
        bootstrap(sums, lambda s: 100.0 * np.expm1((s[..., 1] - s[..., 2]) / s[..., 0])),
        bootstrap(sums, lambda s: s[..., 3] / s[..., 0]),
        bootstrap(sums, lambda s: 100.0 * s[..., 4] / s[..., 0]),
    )


def traffic(runs: Sequence[WindowRun], logical: tuple[int, int] | None = None) -> Traffic:
    """Figures of one arm's windows; `logical` are lookups and misses that replace those of the real cache."""
    total = Counters()
    for run in runs:
        total.add(run.counters)
    lookups, misses = logical or (total.lookups, total.misses)
    tok_s = read = None
    if all(run.seconds is not None for run in runs):
        sums = np.array([[len(run.scores.nll), run.seconds] for run in runs], np.float64)
        tok_s = bootstrap(sums, lambda s: s[..., 0] / s[..., 1])
        read = sum(run.load_bytes or 0 for run in runs) / sums[:, 0].sum()
    hits = ratios.percent(lookups - misses, lookups)
    pinned = 0.0 if logical else ratios.percent(total.hits_pin, lookups)
    return Traffic(
        tok_s,
        hits,
        pinned,
        hits - pinned,
        read,
        ratios.swap_pct(total),
        ratios.route_agree(total),
        ratios.route_kl(total),
    )


def bootstrap(sums: F64, figure: Callable[[F64], F64]) -> Interval:
    """`figure` of the column totals of `sums`, float64 [windows, columns], and its interval.

    Windows are drawn anew with replacement, whole windows because their tokens depend on each other.
    `figure` takes [..., columns] and gives [...]. The draws are the same for every figure.
    """
    windows = len(sums)
    drawn = np.random.default_rng(0).integers(windows, size=(RESAMPLES, windows))
    values = figure(sums[drawn].sum(axis=1))
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(float(figure(sums.sum(axis=0))), float(low), float(high))
