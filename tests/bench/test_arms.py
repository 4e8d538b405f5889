"""Arms: the same windows, the same cache at the start, in turns."""

from __future__ import annotations

import numpy as np
import pytest

from coli_server.bench.arms import Arm, arms_of, run_arms
from coli_server.bench.decode import STOCK
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy

POLICY = RoutePolicy(mode="max-rank", j=0, m=8)


def test_names() -> None:
    assert [(arm.name, arm.policy.active, arm.pilot) for arm in arms_of("stock,A,B,C", POLICY)] == [
        ("stock", False, False),
        ("A", True, False),
        ("B", False, True),
        ("C", True, True),
    ]
    assert [arm.name for arm in arms_of("C", POLICY)] == ["stock", "C"]
    assert arms_of("A", POLICY)[1].policy == POLICY
    assert arms_of("A", RoutePolicy(m=9))[1].policy == RoutePolicy(mode="max-rank", m=9)
    assert arms_of("C", POLICY)[1].describe() == "max-rank,J=0,M=8,shared,pilot"


@pytest.mark.parametrize("words", ["", ",", "D", "stock,a", "A B"])
def test_other_names_are_refused(words: str) -> None:
    with pytest.raises(ConfigurationError, match="stock, A, B, C"):
        arms_of(words, POLICY)


@pytest.mark.parametrize("warm", [False, True])
def test_each_turn_begins_with_the_same_cache(tiny: Engine, windows: list[Window], warm: bool) -> None:
    twins = [Arm(name, policy, False) for name in "12" for policy in (STOCK, POLICY)]
    runs = run_arms(tiny, windows, twins, warm=warm)
    for first, second in ((0, 2), (1, 3)):
        for a, b in zip(runs[first], runs[second], strict=True):
            assert a.counters == b.counters
            assert a.load_bytes == b.load_bytes
            assert a.scores.nll.tolist() == b.scores.nll.tolist()
    assert runs[0][0].counters != runs[0][1].counters


def test_prefetch_changes_no_bit_of_stock_output(tiny: Engine, windows: list[Window]) -> None:
    stock, prefetched = run_arms(tiny, windows, arms_of("B", POLICY))
    issued = tiny.cache.counters.prefetch_issued
    assert issued > 0
    for a, b in zip(stock, prefetched, strict=True):
        assert a.scores.nll.tolist() == b.scores.nll.tolist()
        assert not b.scores.kl.any()
        assert np.array_equal(a.choices, b.choices)
    assert not tiny.model.pilot


def test_arms_take_turns(tiny: Engine, windows: list[Window]) -> None:
    seen: list[bool] = []
    step = tiny.step

    def watched(spans: list[object]) -> object:
        if not spans[0].prompt and spans[0].sequence.position == 0:  # type: ignore[attr-defined]
            seen.append(tiny.model.pilot)
        return step(spans)  # type: ignore[arg-type]

    tiny.step = watched  # type: ignore[method-assign, assignment]
    try:
        run_arms(tiny, windows, arms_of("stock,B", POLICY))
    finally:
        del tiny.step
    assert seen == [False, True, True, False, False, True]


def test_session_scope_needs_no_real_cache(tiny: Engine, windows: list[Window]) -> None:
    policy = RoutePolicy(mode="max-rank", j=0, m=8, scope="session", capacity=3)
    stock, routed = run_arms(tiny, windows, arms_of("A", policy))
    assert [run.seconds for run in (*stock, *routed)] == [None] * 6
    assert not any(run.scores.kl.any() for run in stock)
    assert sum(run.counters.route_swaps for run in routed) > 0
