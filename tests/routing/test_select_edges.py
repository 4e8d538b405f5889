"""Single cases: hand-made windows, ties, masks, spans, and everything that select refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coli_server.errors import ModelError
from coli_server.routing import RoutePolicy, RoutingError, ScoreError, Selection, kernels, select

SCORES = [0.30, 0.20, 0.15, 0.12, 0.10, 0.08, 0.05]


def floats(values: list[float]) -> NDArray[np.float32]:
    return np.array([values], np.float32)


def route(
    policy: RoutePolicy, here: set[int], *, scores: list[float] = SCORES, k: int = 3, **more: Any
) -> Selection:
    s = floats(scores)
    resident = np.isin(np.arange(len(scores)), list(here))
    return select(s, more.pop("weights", s), resident, k, policy, **more)


@pytest.mark.parametrize(
    ("policy", "here", "experts"),
    [
        (RoutePolicy("max-rank", j=0, m=4), {3, 4, 5}, [0, 1, 3]),
        (RoutePolicy("max-rank", j=0, m=6), {3, 4, 5}, [3, 4, 5]),
        (RoutePolicy("max-rank", j=1, m=6), {3, 4, 5}, [0, 3, 4]),
        (RoutePolicy("max-rank", j=2, m=100), {5, 6}, [0, 1, 5]),
        (RoutePolicy("max-rank", j=9, m=6), {3, 4, 5}, [0, 1, 2]),
        (RoutePolicy("max-rank", j=0, m=1), {3, 4, 5}, [0, 1, 2]),
        (RoutePolicy("max-rank", j=0, m=6), {1, 5}, [0, 1, 5]),
    ],
)
def test_max_rank_by_hand(policy: RoutePolicy, here: set[int], experts: list[int]) -> None:
    assert route(policy, here).experts[0].tolist() == experts


@pytest.mark.parametrize(("p", "window"), [(0.1, 3), (0.6, 3), (0.66, 4), (0.8, 5), (0.94, 6), (0.96, 7)])
def test_the_mass_window_is_the_smallest_prefix_and_never_under_k(p: float, window: int) -> None:
    chosen = route(RoutePolicy("max-rank", j=0, m=1, p=p), {3, 4, 5, 6}).experts[0].tolist()
    inside = list(range(3, window))
    assert chosen == [*range(3 - len(inside[:3])), *inside[:3]]


@pytest.mark.parametrize(("p", "window"), [(0.25, 2), (0.5, 4), (0.75, 6)])
def test_a_prefix_that_holds_exactly_the_share_is_enough(p: float, window: int) -> None:
    policy = RoutePolicy("max-rank", j=0, p=p)
    assert route(policy, {window - 1}, scores=[0.125] * 8, k=1).experts[0].tolist() == [window - 1]
    assert route(policy, {window}, scores=[0.125] * 8, k=1).experts[0].tolist() == [0]


def test_the_mass_window_leaves_masked_experts_out_of_the_total() -> None:
    scores = [0.4, 0.3, 0.2, 0.1, -math.inf]
    weights = floats([0.4, 0.3, 0.2, 0.1, 9.0])
    policy = RoutePolicy("max-rank", j=0, p=0.65)
    assert route(policy, {1, 2}, scores=scores, weights=weights, k=1).experts[0].tolist() == [1]
    assert route(policy, {2, 4}, scores=scores, weights=weights, k=1).experts[0].tolist() == [0]


def test_the_mass_window_follows_the_ranking_not_the_masses() -> None:
    weights = floats([0.1, 0.1, 0.7, 0.1])
    scores = [4.0, 3.0, 2.0, 1.0]
    policy = RoutePolicy("max-rank", j=0, p=0.5)
    assert route(policy, {2, 3}, scores=scores, weights=weights, k=1).experts[0].tolist() == [2]
    assert route(policy, {3}, scores=scores, weights=weights, k=1).experts[0].tolist() == [0]


def test_cache_prior_by_hand() -> None:
    z = [3.0, 2.0, 1.5, 1.0, 0.0]
    policy = RoutePolicy("cache-prior", j=1, lam=0.5)
    assert route(policy, {3}, scores=z, k=2, span=2.5).experts[0].tolist() == [0, 3]
    assert route(policy, {3}, scores=z, k=2, span=1.5).experts[0].tolist() == [0, 1]
    assert route(policy, {3, 4}, scores=z, k=2).experts[0].tolist() == [0, 3]  # its own span is 3
    assert route(policy, {4}, scores=z, k=2, span=100.0).experts[0].tolist() == [0, 4]


def test_a_tie_of_the_prior_goes_to_the_better_original_rank() -> None:
    policy = RoutePolicy("cache-prior", j=0, lam=1.0)
    assert route(policy, {2}, scores=[3.0, 2.0, 1.0], k=1, span=2.0).experts[0].tolist() == [0]
    assert route(policy, {2}, scores=[3.0, 2.0, 1.0], k=1, span=2.5).experts[0].tolist() == [2]
    assert route(policy, {2}, scores=[3.0, 2.0, 1.0], k=2, span=1.0).experts[0].tolist() == [0, 1]


def test_a_bonus_that_rounding_swallows_changes_nothing() -> None:
    policy = RoutePolicy("cache-prior", j=0, lam=1.0)
    for here in ({0}, {1}):
        assert route(policy, here, scores=[1.0, 1.0], k=1, span=1e-30).experts[0].tolist() == [0]


def test_each_token_has_its_own_span() -> None:
    scores = np.tile(np.array([3.0, 2.0, 1.0], np.float32), (3, 1))
    policy = RoutePolicy("cache-prior", j=0, lam=1.0)
    got = select(scores, scores, np.array([0, 0, 1], np.bool_), 1, policy, span=np.array([1.0, 2.5, 1.5]))
    assert got.experts.tolist() == [[0], [2], [0]]


def test_own_span_leaves_masked_experts_out() -> None:
    policy = RoutePolicy("cache-prior", j=0, lam=1.0)
    logits = floats([3.0, 2.5, 2.0, -50.0])
    scores = [0.5, 0.3, 0.2, -math.inf]
    # The span is 1: expert 2 ties with expert 0 and loses. With the masked logit it would win.
    assert route(policy, {2}, scores=scores, k=1, logits=logits).experts[0].tolist() == [0]


def test_scores_that_rounding_made_equal_do_not_become_swaps() -> None:
    logits = floats([-200.0, -150.0, 0.0])
    scores = [0.0, 0.0, 1.0]
    for lam, here in ((1.0, {0, 1, 2}), (1.0, set[int]()), (0.0, {1})):
        policy = RoutePolicy("cache-prior", j=0, lam=lam)
        assert route(policy, here, scores=scores, k=2, logits=logits).experts[0].tolist() == [2, 0]


def test_equal_scores_rank_by_the_lower_id_and_zero_has_no_sign() -> None:
    assert route(RoutePolicy(), set(), scores=[0.0, -0.0, 0.0, -0.0], k=3).experts[0].tolist() == [0, 1, 2]
    assert route(RoutePolicy(), set(), scores=[-0.0, 0.0], k=1).experts[0].tolist() == [0]
    assert route(RoutePolicy(), set(), scores=[-2.0, -1.0, -1.0, -3.0], k=4).experts[0].tolist() == [
        1,
        2,
        0,
        3,
    ]


def test_alpha_shrinks_substitutes_only_and_before_renormalisation() -> None:
    policy = RoutePolicy("max-rank", j=1, alpha=0.5)
    got = route(policy, {3}, k=2, renormalize=True, scale=2.0)
    assert got.experts[0].tolist() == [0, 3]
    np.testing.assert_allclose(got.weights[0], [2 * 0.30 / 0.36, 2 * 0.06 / 0.36], rtol=1e-6)
    got = route(policy, {3}, k=2, scale=2.0)
    np.testing.assert_allclose(got.weights[0], [0.60, 0.12], rtol=1e-6)
    assert got.mass_kept[0] == pytest.approx(0.36 / 0.50)


def test_experts_without_any_mass_weigh_nothing_and_lose_nothing() -> None:
    weights = floats([0.0, 0.0, 0.5, 0.0])
    got = route(
        RoutePolicy("max-rank", j=0), {3}, scores=[4.0, 3.0, 2.0, 1.0], weights=weights, k=2, renormalize=True
    )
    assert got.experts[0].tolist() == [0, 3]
    assert got.weights[0].tolist() == [0.0, 0.0]
    assert (got.kl[0], got.mass_kept[0]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "span", [2.5, np.float32(2.5), np.array(2.5, np.float32), np.full(3, 2.5, np.float32)]
)
def test_a_span_is_one_number_or_one_a_token(span: Any) -> None:
    scores = np.tile(np.array([3.0, 2.0, 1.0], np.float32), (3, 1))
    got = select(
        scores, scores, np.array([0, 0, 1], np.bool_), 1, RoutePolicy("cache-prior", j=0, lam=1.0), span=span
    )
    assert got.experts.tolist() == [[2], [2], [2]]


def test_no_token_gives_an_empty_selection() -> None:
    nothing = np.empty((0, 4), np.float32)
    got = select(nothing, nothing, np.zeros(4, np.bool_), 2, RoutePolicy("max-rank"))
    assert got.experts.shape == (0, 2)
    assert got.kl.shape == (0,)


def test_one_compiled_kernel_serves_every_kind_of_call() -> None:
    compiled = len(kernels.route.signatures)  # type: ignore[attr-defined]
    s = np.asfortranarray(np.random.default_rng(0).random((6, 5), np.float32))
    for mode in ("off", "max-rank", "cache-prior"):
        for resident in (np.zeros(5, np.bool_), np.zeros((6, 5), np.bool_)[:, ::-1]):
            select(s, s[::-1], resident, 2, RoutePolicy(mode), logits=s, span=1, scale=2)
    assert len(kernels.route.signatures) == compiled  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["off", "max-rank", "cache-prior"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("token", "expert"), [(0, 0), (1, 3), (2, 6)])
def test_a_score_or_mass_that_is_not_finite_fails_by_name(
    mode: Any, value: float, token: int, expert: int
) -> None:
    good = np.tile(np.array(SCORES, np.float32), (3, 1))
    bad = good.copy()
    bad[token, expert] = value
    for scores, weights, name in ((bad, good, "score"), (good, bad, "gate mass")):
        with pytest.raises(ScoreError) as failure:
            select(scores, weights, np.ones(7, np.bool_), 2, RoutePolicy(mode))
        assert str(failure.value) == (
            f"the router's {name} of expert {expert} is {value} in token row {token}: "
            "it must be a finite number"
        )
        assert (failure.value.token, failure.value.expert) == (token, expert)
        assert failure.value.code == "MODEL"
        assert isinstance(failure.value, ModelError)
        assert isinstance(failure.value, RoutingError)


def test_a_mass_of_minus_infinity_is_not_a_mask() -> None:
    weights = floats([0.3, -math.inf, 0.2])
    with pytest.raises(ScoreError, match="gate mass of expert 1 is -inf in token row 0"):
        route(RoutePolicy(), set(), scores=[0.3, 0.2, 0.1], weights=weights, k=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("span", [None, 1.0])
def test_a_logit_that_is_not_finite_fails_by_name(value: float, span: float | None) -> None:
    logits = floats(SCORES)
    logits[0, 5] = value
    with pytest.raises(ScoreError, match=rf"logit of expert 5 is {value} in token row 0"):
        route(RoutePolicy("cache-prior"), {1}, logits=logits, span=span)


@pytest.mark.parametrize("span", [math.nan, math.inf, -1.0])
def test_a_span_out_of_range_fails(span: float) -> None:
    with pytest.raises(ScoreError, match=re.escape(f"the span is {span} in token row 0")):
        route(RoutePolicy("cache-prior"), {1}, span=span)


@pytest.mark.parametrize("mode", ["off", "max-rank", "cache-prior"])
def test_too_few_unmasked_experts_fail(mode: Any) -> None:
    scores = np.array([[0.5, 0.3, 0.2], [0.5, -np.inf, -np.inf]], np.float32)
    with pytest.raises(
        ScoreError, match="token row 1 has 1 unmasked experts: at least K=2 are needed"
    ) as failure:
        select(scores, scores, np.ones(3, np.bool_), 2, RoutePolicy(mode))
    assert (failure.value.token, failure.value.expert, failure.value.code) == (1, None, "MODEL")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": np.zeros((2, 3))}, "scores are float64"),
        ({"scores": np.zeros(3, np.float32)}, "scores are float32 (3,)"),
        ({"weights": np.zeros((2, 4), np.float32)}, "weights are float32 (2, 4)"),
        ({"weights": np.zeros((2, 3))}, "weights are float64 (2, 3)"),
        ({"logits": np.zeros((1, 3), np.float32)}, "logits are float32 (1, 3)"),
        ({"resident": np.zeros(4, np.bool_)}, "resident is bool (1, 4)"),
        ({"resident": np.zeros((3, 3), np.bool_)}, "resident is bool (3, 3)"),
        ({"resident": np.zeros(3, np.uint8)}, "resident is uint8"),
        ({"k": 0}, "k is 0: it must be from 1 to the number of experts, 3"),
        ({"k": 4}, "k is 4"),
        ({"span": np.zeros(3)}, "span has the shape (3,): one number or [2] is needed"),
        ({"span": np.zeros((2, 1))}, "span has the shape (2, 1)"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "scores": np.zeros((2, 3), np.float32),
        "weights": np.zeros((2, 3), np.float32),
        "resident": np.zeros(3, np.bool_),
        "k": 1,
        "policy": RoutePolicy("max-rank"),
    }
    with pytest.raises(RoutingError, match=re.escape(message)):
        select(**{**given, **change})
