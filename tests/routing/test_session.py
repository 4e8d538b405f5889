"""The logical LRU and the running span against plain models."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.routing import RoutePolicy, SessionResidency, SpanMean, select


class PlainLru:
    """An LRU of ids: the last of the dictionary is the most recently touched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: OrderedDict[int, None] = OrderedDict()

    def touch(self, expert: int) -> None:
        self.ids[expert] = None
        self.ids.move_to_end(expert)
        if len(self.ids) > self.capacity:
            self.ids.popitem(last=False)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Experts, capacity, and the choices of some tokens."""
    experts = draw(st.integers(1, 24))
    capacity = draw(st.integers(1, experts + 2))
    k = draw(st.integers(1, experts))
    token = st.permutations(range(experts)).map(lambda order: order[:k])
    return experts, capacity, draw(st.lists(token, max_size=30))


@given(histories())
def test_the_logical_lru_is_an_lru(history: tuple[int, int, list[list[int]]]) -> None:
    experts, capacity, tokens = history
    residency = SessionResidency.empty(3, experts, capacity)
    plain = PlainLru(capacity)
    for chosen in tokens:
        residency.touch(1, np.array(chosen, np.int32))
        for expert in chosen:
            plain.touch(expert)
        assert np.flatnonzero(residency.row(1)).tolist() == sorted(plain.ids)
    assert not residency.stamps[[0, 2]].any()


def test_the_best_of_a_token_is_touched_first_and_so_leaves_first() -> None:
    residency = SessionResidency.empty(1, 8, 3)
    residency.touch(0, np.array([5, 1, 6], np.int32))
    residency.touch(0, np.array([2], np.int32))
    assert np.flatnonzero(residency.row(0)).tolist() == [1, 2, 6]


def test_a_capacity_under_k_keeps_the_worst_ranked_of_a_token() -> None:
    residency = SessionResidency.empty(1, 8, 2)
    residency.touch(0, np.array([5, 1, 6, 0], np.int32))
    assert np.flatnonzero(residency.row(0)).tolist() == [0, 6]


def test_a_row_and_a_copy_do_not_move_with_later_touches() -> None:
    residency = SessionResidency.empty(1, 4, 2)
    residency.touch(0, np.array([3], np.int32))
    row, copy = residency.row(0), residency.copy()
    residency.touch(0, np.array([1, 2], np.int32))
    assert row.tolist() == copy.row(0).tolist() == [False, False, False, True]
    assert row.dtype == np.bool_


grids = st.integers(1, 6).flatmap(
    lambda experts: st.lists(
        st.lists(st.floats(-50, 50, width=32), min_size=experts, max_size=experts), min_size=1, max_size=8
    )
)


@given(grids, st.data())
def test_the_span_is_the_mean_over_all_tokens_so_far_in_any_chunks(
    rows: list[list[float]], data: st.DataObject
) -> None:
    logits = np.array(rows, np.float32)
    masked = np.array(
        [[data.draw(st.booleans()) if e else False for e in range(len(rows[0]))] for _ in rows], np.bool_
    )
    scores = np.where(masked, -np.inf, logits).astype(np.float32)
    mean = SpanMean.empty(2)
    cut = data.draw(st.integers(0, len(rows)))
    got = [*mean.observe(1, scores[:cut], logits[:cut]), *mean.observe(1, scores[cut:], logits[cut:])]
    spreads = [float(z[~m].max()) - float(z[~m].min()) for z, m in zip(logits, masked, strict=True)]
    want = [sum(spreads[: n + 1]) / (n + 1) for n in range(len(spreads))]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert mean.tokens.tolist() == [0, len(rows)]
    assert mean.totals[0] == 0.0


def test_the_first_token_sees_its_own_span() -> None:
    scores = np.array([[3.0, 2.0, 1.5, 1.0]], np.float32)
    resident = np.array([0, 0, 0, 1], np.bool_)
    policy = RoutePolicy("cache-prior", j=0, lam=0.9)
    observed = select(scores, scores, resident, 1, policy, span=SpanMean.empty(1).observe(0, scores))
    own = select(scores, scores, resident, 1, policy)
    assert observed.experts.tobytes() == own.experts.tobytes()
    assert SpanMean.empty(1).observe(0, scores).tolist() == [2.0]


def test_a_copied_span_goes_its_own_way() -> None:
    mean = SpanMean.empty(1)
    mean.observe(0, np.array([[1.0, 2.0]], np.float32))
    copy = mean.copy()
    mean.observe(0, np.array([[1.0, 4.0]], np.float32))
    assert copy.observe(0, np.array([[1.0, 6.0]], np.float32)).tolist() == [3.0]
    assert mean.totals.tolist() == [4.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_logit_never_becomes_a_span(value: float) -> None:
    logits = np.array([[1.0, value, 2.0]], np.float32)
    scores = np.array([[0.3, 0.3, 0.4]], np.float32)
    assert np.isnan(SpanMean.empty(1).observe(0, scores, logits)).all()
