import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.telemetry.histogram import BOUNDS, Histogram

DURATIONS = st.floats(0, 500, allow_nan=False)


def observed(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram


def test_bounds_reach_from_a_millisecond_to_ten_minutes() -> None:
    assert BOUNDS[0] == 0.001
    assert BOUNDS[-2] < 1200
    assert BOUNDS[-1] >= 600
    assert list(BOUNDS) == sorted(set(BOUNDS))


@given(st.floats(0, 1e6))
def test_a_value_is_counted_in_the_bucket_that_holds_it(value: float) -> None:
    bucket = observed([value]).snapshot().counts.index(1)
    low = BOUNDS[bucket - 1] if bucket else 0.0
    high = BOUNDS[bucket] if bucket < len(BOUNDS) else float("inf")
    assert low * (1 - 1e-12) <= value <= high * (1 + 1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_belongs_to_the_bucket_above_it(bound: float) -> None:
    assert observed([bound * (1 + 1e-12)]).snapshot().counts.index(1) == BOUNDS.index(bound) + 1


@given(st.lists(DURATIONS, min_size=1))
def test_count_sum_and_maximum_are_exact(values: list[float]) -> None:
    snapshot = observed(values).snapshot()
    assert snapshot.count == len(values)
    assert snapshot.sum == pytest.approx(sum(values))
    assert snapshot.maximum == max(values)


@given(st.lists(st.floats(0.001, 500), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_within_a_bucket_of_the_true_one(values: list[float], q: float) -> None:
    estimate = observed(values).snapshot().quantile(q)
    ordered = sorted(values)
    rank = max(0, -int(-q * len(values) // 1) - 1)  # the smallest value that has the share q at or below it
    assert ordered[rank] * 0.79 <= estimate <= ordered[rank] * 1.26


def test_quantiles_of_nothing_are_zero() -> None:
    assert Histogram().snapshot().quantile(0.99) == 0.0


@given(st.lists(DURATIONS, min_size=2))
def test_quantiles_grow_with_q_and_never_pass_the_maximum(values: list[float]) -> None:
    snapshot = observed(values).snapshot()
    estimates = [snapshot.quantile(q) for q in (0.1, 0.5, 0.9, 0.99, 1.0)]
    assert estimates == sorted(estimates)
    assert estimates[-1] <= max(values)


def test_a_uniform_distribution_has_its_median_in_the_middle() -> None:
    values = [index / 1000 for index in range(1, 1001)]
    assert observed(values).snapshot().quantile(0.5) == pytest.approx(statistics.median(values), rel=0.03)


def test_a_window_is_the_difference_of_two_snapshots() -> None:
    histogram = observed([5.0] * 10)
    earlier = histogram.snapshot()
    histogram.observe(0.0035)
    window = histogram.snapshot() - earlier
    assert window.count == 1
    assert window.sum == pytest.approx(0.0035)
    assert window.quantile(0.5) == pytest.approx(0.0035, rel=0.15)


def test_a_clock_that_went_backwards_counts_as_zero() -> None:
    snapshot = observed([-1.0]).snapshot()
    assert (snapshot.count, snapshot.sum) == (1, 0.0)
