"""What holds for every selection, and agreement with the plain reference of conftest.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coli_server.routing import RoutePolicy, Selection, select

Same = Callable[[Selection, int, Selection, int], bool]


@dataclass(frozen=True)
class Batch:
    """Arguments of `select`, every row of which has at least k unmasked experts."""

    scores: NDArray[np.float32]
    weights: NDArray[np.float32]
    logits: NDArray[np.float32] | None
    resident: NDArray[np.bool_]
    k: int
    span: NDArray[np.float64] | None
    renormalize: bool
    scale: float

    def select(self, policy: RoutePolicy) -> Selection:
        return select(
            self.scores,
            self.weights,
            self.resident,
            self.k,
            policy,
            logits=self.logits,
            span=self.span,
            renormalize=self.renormalize,
            scale=self.scale,
        )

    def row(self, t: int) -> Batch:
        rows = slice(t, t + 1)
        return replace(
            self,
            scores=self.scores[rows],
            weights=self.weights[rows],
            logits=None if self.logits is None else self.logits[rows],
            resident=self.resident[rows],
            span=None if self.span is None else self.span[rows],
        )

    def available(self) -> int:
        return int((self.scores > -np.inf).sum(axis=1).min())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Softmax and sigmoid routers on a coarse grid (so that ties abound), with masked experts."""
    experts = draw(st.integers(1, 40))
    tokens = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = draw(st.sampled_from([1, 4, 1000]))  # of a logit: whole numbers tie often, thousandths seldom
    shape = (tokens, experts)
    raw = np.round(rng.normal(0.0, draw(st.sampled_from([0.0, 1.0, 3.0])), shape) * steps) / steps
    masked = rng.random(shape) < draw(st.sampled_from([0.0, 0.3]))
    masked[:, rng.integers(experts)] = False
    logits: NDArray[np.float32] | None = None
    if draw(st.booleans()):
        logits = raw.astype(np.float32)
        weights = np.exp(raw - raw.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        scores = weights
    else:
        weights = 1.0 / (1.0 + np.exp(-raw))
        scores = weights + np.round(rng.normal(0.0, 0.3, experts), 1)
    least = int((~masked).sum(axis=1).min())
    return Batch(
        scores=np.where(masked, -np.inf, scores).astype(np.float32),
        weights=np.where(masked, 0.0, weights).astype(np.float32),
        logits=logits,
        resident=rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        k=draw(st.integers(1, least)),
        span=draw(st.sampled_from([None, rng.gamma(2.0, 2.0, tokens)])),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5, 0.1])),
    )


policies = st.builds(
    RoutePolicy,
    mode=st.sampled_from(["off", "max-rank", "cache-prior"]),
    j=st.integers(0, 12),
    m=st.integers(1, 50),
    p=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99]),
    alpha=st.sampled_from([1.0, 0.5, 0.01]),
    lam=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@given(batches(), policies)
def test_every_token_is_what_the_definition_says(
    reference: Callable[..., Any], batch: Batch, policy: RoutePolicy
) -> None:
    got = batch.select(policy)
    for t in range(len(batch.scores)):
        want = reference(
            [float(x) for x in batch.scores[t]],
            [float(x) for x in batch.weights[t]],
            [bool(x) for x in batch.resident[t]],
            batch.k,
            policy,
            logits=None if batch.logits is None else [float(x) for x in batch.logits[t]],
            span=None if batch.span is None else float(batch.span[t]),
            renormalize=batch.renormalize,
            scale=batch.scale,
        )
        assert got.experts[t].tolist() == want.experts
        assert got.true[t].tolist() == want.true
        np.testing.assert_allclose(got.weights[t], want.weights, rtol=1e-6)
        assert got.swaps[t] == want.swaps
        assert got.kl[t] == pytest.approx(want.kl, abs=1e-9)
        assert got.mass_kept[t] == pytest.approx(want.mass_kept, abs=1e-12)
        if policy.mode == "max-rank":
            assert set(got.experts[t].tolist()) <= set(want.window)


@given(batches(), policies)
def test_what_always_holds(batch: Batch, policy: RoutePolicy) -> None:
    got = batch.select(policy)
    assert got.experts.dtype == got.true.dtype == np.int32
    assert got.weights.dtype == np.float32
    assert got.experts.shape == got.true.shape == got.weights.shape == (len(batch.scores), batch.k)
    for t, (chosen, true) in enumerate(zip(got.experts.tolist(), got.true.tolist(), strict=True)):
        assert len(set(chosen)) == batch.k
        assert set(true[: policy.j]) <= set(chosen)
        assert np.all(batch.scores[t, chosen] > -np.inf)
        ranks = [(-float(batch.scores[t, e]), e) for e in chosen]
        assert ranks == sorted(ranks)
        assert got.swaps[t] == len(set(chosen) - set(true))
        assert got.agree[t] == batch.k - got.swaps[t]
        assert got.kl[t] >= 0.0
        if got.swaps[t] == 0:
            assert (got.kl[t], got.mass_kept[t]) == (0.0, 1.0)


@given(batches(), policies)
def test_a_batch_is_its_tokens_one_at_a_time_bit_for_bit(
    same_bytes: Same, batch: Batch, policy: RoutePolicy
) -> None:
    together = batch.select(policy)
    for t in range(len(batch.scores)):
        assert same_bytes(together, t, batch.row(t).select(policy), 0)


@pytest.mark.parametrize("name", ["J=K", "M=K", "lambda=0", "everything resident", "nothing resident"])
@given(batch=batches(), alpha=st.sampled_from([1.0, 0.5]))
def test_what_changes_nothing_leaves_the_bytes_of_the_stock_router(
    same_bytes: Same, name: str, batch: Batch, alpha: float
) -> None:
    stock = batch.select(RoutePolicy())
    k = batch.k
    everything = name in ("everything resident", "nothing resident")
    policies = {
        "J=K": [RoutePolicy(mode, j=k, m=99, lam=1.0, alpha=alpha) for mode in ("max-rank", "cache-prior")],
        "M=K": [RoutePolicy("max-rank", j=0, m=k, alpha=alpha)],
        "lambda=0": [RoutePolicy("cache-prior", j=0, lam=0.0, alpha=alpha)],
    }.get(name, [RoutePolicy("max-rank", j=0, m=99), RoutePolicy("cache-prior", j=0, lam=1.0)])
    if everything:
        batch = replace(batch, resident=np.full_like(batch.resident, name == "everything resident"))
    for policy in policies:
        routed = batch.select(policy)
        for t in range(len(batch.scores)):
            assert same_bytes(routed, t, stock, t)


@given(batches(), policies)
def test_an_unchanged_choice_has_unchanged_bytes(same_bytes: Same, batch: Batch, policy: RoutePolicy) -> None:
    stock, routed = batch.select(RoutePolicy()), batch.select(policy)
    for t in np.flatnonzero(routed.swaps == 0):
        assert same_bytes(routed, int(t), stock, int(t))


@given(batches())
def test_gate_masses_come_back_bit_for_bit_where_the_family_does_nothing_to_them(batch: Batch) -> None:
    got = replace(batch, renormalize=False, scale=1.0).select(RoutePolicy("max-rank", m=50))
    assert got.weights.tobytes() == np.take_along_axis(batch.weights, got.experts, axis=1).tobytes()


@given(batches(), policies)
def test_residency_does_nothing_when_off(same_bytes: Same, batch: Batch, policy: RoutePolicy) -> None:
    off = replace(policy, mode="off")
    here, away = batch.select(off), replace(batch, resident=~batch.resident).select(off)
    for t in range(len(batch.scores)):
        assert same_bytes(here, t, away, t)
        assert here.experts[t].tolist() == here.true[t].tolist()


@given(batches(), policies)
def test_without_meters_the_choice_and_the_counts_stay(batch: Batch, policy: RoutePolicy) -> None:
    measured, silent = batch.select(policy), batch.select(replace(policy, agree=False))
    for name in ("experts", "weights", "swaps", "agree", "true"):
        assert getattr(measured, name).tobytes() == getattr(silent, name).tobytes()
    assert np.isnan(silent.kl).all()
    assert np.isnan(silent.mass_kept).all()
    assert np.isfinite(measured.kl).all()


@given(batches(), policies)
def test_renaming_residents_outside_the_window_changes_nothing(
    same_bytes: Same, batch: Batch, policy: RoutePolicy
) -> None:
    policy = replace(policy, mode="max-rank", p=0.0)
    window = max(policy.m, batch.k)
    order = np.argsort(-batch.scores, axis=1, kind="stable")
    other = batch.resident.copy()
    for t, ranks in enumerate(order):
        other[t, ranks[window:]] ^= True
    before, after = batch.select(policy), replace(batch, resident=other).select(policy)
    for t in range(len(batch.scores)):
        assert same_bytes(before, t, after, t)


@given(batches(), st.data())
def test_k_of_all_unmasked_experts_takes_them_all(batch: Batch, data: st.DataObject) -> None:
    batch = replace(batch.row(0), k=batch.row(0).available())
    got = batch.select(data.draw(policies))
    assert sorted(got.experts[0].tolist()) == np.flatnonzero(batch.scores[0] > -np.inf).tolist()
    assert got.swaps[0] == 0


def test_the_kl_of_a_swap_is_never_below_zero() -> None:
    """A dropped expert that weighs less than the floor adds a negative term."""
    scores = np.array([[0.9, 0.8, 0.7]], np.float32)
    weights = np.array([[0.5, 1e-14, 0.5]], np.float32)
    resident = np.array([0, 0, 1], np.bool_)
    got = select(scores, weights, resident, 2, RoutePolicy("max-rank", j=1, alpha=1e-30))
    assert got.experts.tolist() == [[0, 2]]
    assert got.kl[0] == 0.0
    got = select(scores, weights, resident, 2, RoutePolicy("max-rank", j=1))
    assert got.kl[0] == pytest.approx(math.log(2.0))
