"""Routers of the families, and how cache-aware selection composes with each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.engine.routers import score
from coli_server.engine.spec import Router
from coli_server.engine.step import Span
from coli_server.routing import RoutePolicy, ScoreError, select

MODELS = Path(__file__).parents[1] / "data" / "models"
STOCK = RoutePolicy(mode="off")
F64 = NDArray[np.float64]


def softmax_share(row: F64, expert: int, race: list[int]) -> float:
    """The share of `expert` in a softmax over `race`."""
    return float(1.0 / np.exp(row[race] - row[expert]).sum())


def near_ties(row: F64, top: int, jitter: float, race: list[int]) -> list[int]:
    """Experts of `race` that sparsemixer does not distinguish from `top`."""
    return [e for e in race if (row[top] - row[e]) / max(abs(row[e]), row[top]) <= 2 * jitter]


def sparsemixer_by_hand(row: F64, jitter: float) -> tuple[list[int], list[float]]:
    """The stock choice of SparseMixer-v2 for one token, in float64: two experts and their weights."""
    everyone = list(range(len(row)))
    first = max(everyone, key=lambda e: row[e])
    others = [e for e in everyone if e != first]
    second = max(others, key=lambda e: row[e])
    return [first, second], [
        softmax_share(row, first, near_ties(row, first, jitter, everyone)),
        softmax_share(row, second, near_ties(row, second, jitter, others)),
    ]


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("shift", [-4.0, 0.0, 4.0])
def test_stock_sparsemixer_equals_the_definition(jitter: float, shift: float) -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((200, 9)) + shift).astype(np.float32)
    scores, mass = score(Router("sparsemixer", jitter=jitter), logits, None)
    chosen = select(scores, mass, np.zeros(9, bool), 2, STOCK)
    for row, experts, weights in zip(logits, chosen.experts, chosen.weights, strict=True):
        expected, shares = sparsemixer_by_hand(row.astype(np.float64), jitter)
        assert experts.tolist() == expected
        np.testing.assert_allclose(weights, shares, rtol=2e-6)


def test_equal_logits_of_zero_are_near_ties() -> None:
    scores, mass = score(Router("sparsemixer", jitter=0.01), np.zeros((1, 4), np.float32), None)
    chosen = select(scores, mass, np.zeros(4, bool), 2, STOCK)
    assert chosen.experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(chosen.weights, [[1 / 4, 1 / 3]])


def test_a_substitute_outside_the_near_ties_has_a_small_weight_but_never_none() -> None:
    """Sparsemixer's own rule would weigh it 0, so the cache would have saved a read for nothing."""
    logits = np.array([[3.0, 2.9, 1.0, 2.0, -5.0]], np.float32)
    router = Router("sparsemixer", jitter=0.05)
    scores, mass = score(router, logits, None)
    resident = np.array([False, False, False, True, True])
    stock = select(scores, mass, resident, 2, STOCK)
    assert stock.experts.tolist() == [[0, 1]]
    routed = select(scores, mass, resident, 2, RoutePolicy(mode="max-rank", j=1, m=4))
    assert routed.experts.tolist() == [[0, 3]]
    assert routed.weights[0, 0] == stock.weights[0, 0]
    # Only expert 1 is a near tie of itself: the substitute's share of that softmax is exp(2.0 - 2.9).
    np.testing.assert_allclose(routed.weights[0, 1], np.exp(np.float32(2.0) - np.float32(2.9)), rtol=1e-6)
    assert 0 < routed.weights[0, 1] < stock.weights[0, 1]
    halved = select(scores, mass, resident, 2, RoutePolicy(mode="max-rank", j=1, m=4, alpha=0.5))
    assert halved.weights[0, 1] == routed.weights[0, 1] / 2
    far = select(scores, mass, resident, 2, RoutePolicy(mode="max-rank", j=0, m=5))
    assert far.experts.tolist() == [[3, 4]]
    assert (far.weights > 0).all()


def test_a_near_tie_of_the_second_comes_in_with_its_own_share() -> None:
    logits = np.array([[5.0, 2.0, 1.95, -1.0]], np.float32)
    scores, mass = score(Router("sparsemixer", jitter=0.05), logits, None)
    routed = select(
        scores, mass, np.array([False, False, True, False]), 2, RoutePolicy(mode="max-rank", j=1, m=3)
    )
    assert routed.experts.tolist() == [[0, 2]]
    expected = softmax_share(logits[0].astype(np.float64), 2, [1, 2])
    np.testing.assert_allclose(routed.weights[0, 1], expected, rtol=1e-6)


def test_cache_prior_bonus_of_sparsemixer_goes_to_the_logits() -> None:
    logits = np.array([[3.0, 2.0, 1.9, 0.0]], np.float32)
    scores, mass = score(Router("sparsemixer", jitter=0.01), logits, None)
    resident = np.array([False, False, True, False])
    policy = RoutePolicy(mode="cache-prior", j=1, lam=0.05)  # a bonus of 0.05 * 3.0, the span
    assert select(scores, mass, resident, 2, policy).experts.tolist() == [[0, 2]]
    weaker = RoutePolicy(mode="cache-prior", j=1, lam=0.03)
    assert select(scores, mass, resident, 2, weaker).experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_logits_reach_the_selection_which_refuses_them(broken: float) -> None:
    logits = np.array([[1.0, broken, 0.5]], np.float32)
    scores, mass = score(Router("sparsemixer", jitter=0.01), logits, None)
    with pytest.raises(ScoreError):
        select(scores, mass, np.zeros(3, bool), 2, STOCK)


@pytest.mark.parametrize("mode", ["max-rank", "cache-prior"])
def test_no_residency_brings_back_an_expert_outside_the_chosen_groups(mode: str) -> None:
    rng = np.random.default_rng(3)
    router = Router("sigmoid", correction_bias=True, groups=4, topk_groups=2, group_score="top2")
    logits = rng.standard_normal((50, 12)).astype(np.float32)
    scores, mass = score(router, logits, rng.standard_normal(12).astype(np.float32))
    masked = scores == -np.inf
    assert (masked.sum(axis=1) == 6).all()
    assert (mass[masked] == 0).all()
    policy = RoutePolicy(mode=mode, j=0, m=12, lam=1.0)  # type: ignore[arg-type]
    chosen = select(scores, mass, masked, 3, policy)  # exactly the masked experts are resident
    assert not np.take_along_axis(masked, chosen.experts.astype(np.intp), axis=1).any()


def test_the_correction_bias_ranks_and_never_weighs() -> None:
    logits = np.array([[0.0, 0.1, 0.2, 0.3]], np.float32)
    bias = np.array([5.0, 4.0, 0.0, 0.0], np.float32)
    router = Router("sigmoid", correction_bias=True, renormalize=True, scale=2.5)
    scores, mass = score(router, logits, bias)
    resident = np.array([False, False, False, True])
    routed = select(
        scores, mass, resident, 2, RoutePolicy(mode="max-rank", j=1, m=4), renormalize=True, scale=2.5
    )
    assert routed.experts.tolist() == [[0, 3]]
    plain = 1 / (1 + np.exp(-logits[0, [0, 3]].astype(np.float64)))
    np.testing.assert_allclose(routed.weights[0], 2.5 * plain / plain.sum(), rtol=1e-6)


@pytest.mark.parametrize("family", ["phimoe-ties", "glm4_moe-groups", "granitemoe-bias", "qwen2_moe-window"])
def test_cache_aware_decoding_swaps_and_stays_finite(family: str) -> None:
    policy = RoutePolicy(mode="max-rank", j=1, m=8)
    stock = Engine.open(MODELS / family, warm=False)
    engine = Engine.open(MODELS / family, warm=False, policy=policy, experts_per_layer=stock.k)
    sequence = engine.new_sequence(policy, engine.new_kv(64))
    ids = tuple(np.load(MODELS / family / "expected.npz")["ids_1"].tolist())
    logits = engine.step([Span(sequence, ids, prompt=True, length=len(ids))])
    np.testing.assert_array_equal(logits, stock.logits(ids)[-1:])  # a prompt is routed as the model would
    for token in range(24):
        logits = engine.step([Span(sequence, (token,), prompt=False, length=sequence.position + 1)])
    counters = sequence.counters
    assert np.isfinite(logits).all()
    assert 0 < counters.route_swaps < counters.route_slots
    assert counters.route_mass_sum > 0
    engine.close()
    stock.close()
