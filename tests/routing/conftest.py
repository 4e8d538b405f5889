"""A reference implementation of selection that shares nothing with the real one: lists, sorts, float."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.routing import RoutePolicy, Selection, warm

CASES = Path(__file__).parents[1] / "data" / "route_select.jsonl"


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    warm()


@pytest.fixture(scope="session")
def cases() -> list[dict[str, Any]]:
    """The cases of expert selection made by an independent float64 implementation."""
    return [json.loads(line) for line in CASES.read_text().splitlines()]


@dataclass(frozen=True)
class Chosen:
    """What the reference says about one token."""

    experts: list[int]
    true: list[int]
    weights: list[float]
    swaps: int
    kl: float
    mass_kept: float
    window: list[int]


def choose(
    scores: list[float],
    weights: list[float],
    resident: list[bool],
    k: int,
    policy: RoutePolicy,
    *,
    logits: list[float] | None,
    span: float | None,
    renormalize: bool,
    scale: float,
) -> Chosen:
    """Select for one token, word by word as docs/CACHE_ROUTE.md defines it."""
    order = sorted((e for e, s in enumerate(scores) if s != -math.inf), key=lambda e: (-scores[e], e))
    true = order[:k]
    keep = order[: min(policy.j, k)]
    window = order
    if policy.mode == "off":
        chosen = true
    elif policy.mode == "max-rank":
        size = policy.m
        if policy.p > 0.0:
            total = math.fsum(weights[e] for e in order)
            size = next(n for n in range(len(order) + 1) if mass(weights, order[:n]) >= policy.p * total)
        window = order[: max(size, k)]
        here = [e for e in window if resident[e] and e not in keep]
        others = [e for e in order if e not in keep and e not in here]
        chosen = (keep + here + others)[:k]
    else:
        z = scores if logits is None else logits
        spread = max(z[e] for e in order) - min(z[e] for e in order) if span is None else span
        prior = {e: z[e] + policy.lam * spread * (resident[e] or e in keep) for e in order}
        chosen = sorted(order, key=lambda e: (-prior[e], order.index(e)))[:k]
    chosen = sorted(chosen, key=order.index)
    after = {e: weights[e] * (1.0 if e in true else policy.alpha) for e in chosen}
    kept = math.fsum(after.values())
    norm = kept + 1e-20 if renormalize else 1.0
    before = mass(weights, true)
    kl = sum(
        weights[e] / before * math.log(weights[e] / before / max(after.get(e, 0.0) / kept, 1e-12))
        for e in true
        if weights[e] > 0.0
    )
    return Chosen(
        experts=chosen,
        true=true,
        weights=[after[e] / norm * scale for e in chosen],
        swaps=len(set(chosen) - set(true)),
        kl=kl,
        mass_kept=kept / before,
        window=window,
    )


def mass(weights: list[float], experts: list[int]) -> float:
    return math.fsum(weights[e] for e in experts)


@pytest.fixture(scope="session")
def reference() -> Callable[..., Chosen]:
    return choose


@pytest.fixture(scope="session")
def same_bytes() -> Callable[[Selection, int, Selection, int], bool]:
    """Whether a row of one selection has the bytes of a row of another."""

    def same(a: Selection, i: int, b: Selection, j: int) -> bool:
        names = ("experts", "weights", "swaps", "agree", "kl", "mass_kept", "true")
        return all(
            np.array(getattr(a, n)[i]).tobytes() == np.array(getattr(b, n)[j]).tobytes() for n in names
        )

    return same
