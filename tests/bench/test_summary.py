"""Totals over windows, intervals, and gates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coli_server.bench.decode import WindowRun
from coli_server.bench.gates import DEFAULT, Gate, judge, parse_gates
from coli_server.bench.scores import StockRows, TokenScores, compare
from coli_server.bench.summary import bootstrap, quality, traffic
from coli_server.errors import ConfigurationError, ModelError
from coli_server.telemetry.counters import Counters


def run(nll: list[float], stock: list[float], seconds: float | None = None, **counters: int) -> WindowRun:
    n = len(nll)
    scores = TokenScores(np.array(nll), np.array(stock), np.full(n, 0.25), np.arange(n) % 2 == 0)
    return WindowRun(scores, Counters(**counters), np.zeros((n, 1, 1), np.int16), seconds, 100 * n)


def test_perplexity_is_of_totals_not_a_mean_of_means() -> None:
    figures = quality([run([1.0, 1.0, 1.0], [1.0] * 3), run([5.0], [4.0])])
    assert figures.tokens == 4
    assert figures.perplexity.value == pytest.approx(math.exp(8 / 4))
    assert figures.increase.value == pytest.approx(100 * (math.exp(8 / 4) / math.exp(7 / 4) - 1))
    assert figures.kl.value == pytest.approx(0.25)
    assert figures.top1.value == pytest.approx(75.0)


def test_identical_scores_have_no_increase_and_no_width() -> None:
    figures = quality([run([1.0, 2.0], [1.0, 2.0]), run([3.0], [3.0])])
    assert (figures.increase.value, figures.increase.low, figures.increase.high) == (0.0, 0.0, 0.0)
    assert figures.perplexity.low < figures.perplexity.value < figures.perplexity.high


def test_intervals_cover_the_mean_of_a_known_distribution() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        sums = np.stack([np.ones(30), random.normal(2.0, 1.0, 30)], axis=1)
        interval = bootstrap(sums, lambda s: s[..., 1] / s[..., 0])
        covered += interval.low <= 2.0 <= interval.high
    assert 178 <= covered <= 199  # 95 % of 200, give or take what chance allows


def test_the_same_windows_give_the_same_interval() -> None:
    sums = np.random.default_rng(1).random((9, 2))
    assert bootstrap(sums, lambda s: s[..., 0]) == bootstrap(sums, lambda s: s[..., 0])


def test_traffic() -> None:
    runs = [
        run([1.0] * 4, [1.0] * 4, 2.0, lookups=40, hits_pin=10, hits_lru=20, misses=10, route_slots=40),
        run([1.0] * 2, [1.0] * 2, 0.5, lookups=20, hits_lru=5, misses=15, route_slots=20, route_swaps=6),
    ]
    figures = traffic(runs)
    assert figures.tok_s is not None
    assert figures.tok_s.value == pytest.approx(6 / 2.5)
    assert figures.hit_pct == pytest.approx(100 * 35 / 60)
    assert figures.pin_pct + figures.lru_pct == pytest.approx(figures.hit_pct)
    assert figures.bytes_per_token == pytest.approx(100)
    assert (figures.swap_pct, figures.agree_pct) == (10.0, 90.0)
    logical = traffic(runs, (60, 6))
    assert (logical.hit_pct, logical.pin_pct, logical.lru_pct) == (90.0, 0.0, 90.0)
    assert traffic([run([1.0], [1.0])]).tok_s is None


def test_the_default_gates() -> None:
    assert parse_gates(DEFAULT) == (Gate("ppl", 1.0), Gate("top1", 95.0), Gate("kl", 0.02))
    assert parse_gates("kl=0.5") == (Gate("kl", 0.5),)
    assert parse_gates("ppl=2, top1=90") == (Gate("ppl", 2.0), Gate("top1", 90.0))


@pytest.mark.parametrize(
    "words", ["", "ppl", "ppl=", "ppl=-1%", "ppl=1%,ppl=2%", "top1=101%", "kl=2%", "acc=1"]
)
def test_malformed_gates_are_refused(words: str) -> None:
    with pytest.raises(ConfigurationError, match="--gate"):
        parse_gates(words)


def test_verdicts() -> None:
    figures = quality([run([1.01] * 100, [1.0] * 100)])  # 1.005 %, KL 0.25, top-1 50 %
    limits = [
        ("ppl=1%", False),
        ("ppl=1.1%", True),
        ("top1=50%", True),
        ("top1=50.1%", False),
        ("kl=0.25", True),
    ]
    for words, passed in limits:
        (verdict,) = judge("A", figures, parse_gates(words))
        assert verdict.passed is passed, words
        assert str(verdict).endswith("pass" if passed else "FAIL")
    assert str(judge("A", figures, parse_gates("ppl=1%"))[0]) == (
        "gate ppl A: perplexity increase 1.005 %, at most 1 %: FAIL"
    )


def test_logits_that_are_not_finite_are_refused() -> None:
    good = np.zeros((1, 4), np.float32)
    stock = StockRows.of(good)
    for bad in (np.nan, np.inf):
        rows = good.copy()
        rows[0, 2] = bad
        with pytest.raises(ModelError, match="not finite"):
            StockRows.of(rows)
        with pytest.raises(ModelError, match="not finite"):
            compare(stock, rows, np.array([0]))


def test_an_impossible_token_is_not_an_error() -> None:
    rows = np.array([[0.0, -np.inf, 1.0]], np.float32)
    assert compare(StockRows.of(np.zeros((1, 3), np.float32)), rows, np.array([1])).nll[0] == np.inf
