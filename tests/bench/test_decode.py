"""Teacher-forced decoding: windows in lockstep are windows alone, and stock is exactly stock."""

from __future__ import annotations

import numpy as np
import pytest

from coli_server.bench.decode import STOCK, decode_alone, decode_in_lockstep
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.engine.sampler import log_softmax
from coli_server.engine.step import Span
from coli_server.routing import RoutePolicy

POLICIES = [
    RoutePolicy(mode="max-rank", j=1, m=8, scope="session", capacity=4),
    RoutePolicy(mode="max-rank", j=0, p=0.7, alpha=0.5, scope="session", capacity=3),
    RoutePolicy(mode="cache-prior", j=0, lam=0.4, scope="session", capacity=4),
    STOCK,
]


def test_windows_in_lockstep_are_windows_alone_to_the_last_bit(tiny: Engine, windows: list[Window]) -> None:
    _, runs = decode_in_lockstep(tiny, windows, POLICIES)
    for policy, by_window in zip(POLICIES, runs, strict=True):
        for window, run in zip(windows, by_window, strict=True):
            alone = decode_alone(tiny, window, policy, tiny.logits(window))
            for name in ("nll", "stock_nll", "kl", "same"):
                assert np.array_equal(getattr(run.scores, name), getattr(alone.scores, name)), name
            assert np.array_equal(run.choices, alone.choices)
            for name in ("route_slots", "route_swaps", "route_kl_sum", "lookups"):
                assert getattr(run.counters, name) == getattr(alone.counters, name)
    assert sum(run.counters.route_swaps for run in runs[0]) > 0
    assert runs[0][0].scores.kl.max() > 0


def test_many_windows_and_policies_go_in_several_batches(
    tiny: Engine, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, whole = decode_in_lockstep(tiny, windows, POLICIES)
    monkeypatch.setattr("coli_server.bench.decode.MAX_ROWS", 2)
    seen: list[tuple[int, int]] = []
    stock_again, parts = decode_in_lockstep(
        tiny, windows, POLICIES, lambda done, total: seen.append((done, total))
    )
    assert all(np.array_equal(a, b) for a, b in zip(stock, stock_again, strict=True))
    for a, b in zip(whole, parts, strict=True):
        assert [run.scores.nll.tolist() for run in a] == [run.scores.nll.tolist() for run in b]
    assert seen[-1] == (12, 12)


def test_stock_decoded_is_stock_read_at_once(tiny: Engine, windows: list[Window]) -> None:
    stock, ((run, *_),) = decode_in_lockstep(tiny, windows, [STOCK])
    assert run.scores.kl.tolist() == [0.0] * 23
    assert run.scores.same.all()
    assert np.array_equal(run.scores.nll, run.scores.stock_nll)
    assert np.array_equal(run.choices, stock[0])
    assert (run.choices >= 0).all()
    rows = tiny.logits(windows[0])
    expected = [-log_softmax(row)[token] for row, token in zip(rows, windows[0][1:], strict=False)]
    np.testing.assert_allclose(run.scores.nll, expected, rtol=1e-12)


def test_the_divergence_is_that_of_the_distributions(tiny: Engine, windows: list[Window]) -> None:
    _, ((run, *_),) = decode_in_lockstep(tiny, windows[:1], POLICIES[:1])
    stock = tiny.logits(windows[0])
    sequence = tiny.new_sequence(POLICIES[0], tiny.new_kv(24))
    for t, token in enumerate(windows[0][:-1]):
        (row,) = tiny.step([Span(sequence, (token,), False, 24)])
        p, q = log_softmax(stock[t]), log_softmax(row)
        assert run.scores.kl[t] == pytest.approx(float((np.exp(p) * (p - q)).sum()), abs=1e-12)
        assert run.scores.same[t] == (np.argmax(stock[t]) == np.argmax(row))


def test_in_wide_batches_hardly_anything_is_swapped_and_the_loss_is_hidden(
    tiny: Engine, windows: list[Window]
) -> None:
    policy = RoutePolicy(mode="max-rank", j=0, m=8)
    stock = tiny.logits(windows[0])
    tiny.cache.clear()
    alone = decode_alone(tiny, windows[0], policy, stock)
    tiny.cache.clear()
    wide = decode_alone(tiny, windows[0], policy, stock, chunk=23)
    assert wide.counters.route_slots == alone.counters.route_slots
    assert wide.counters.route_swaps == 0 < alone.counters.route_swaps
    assert wide.scores.nll.tolist() == wide.scores.stock_nll.tolist() != alone.scores.nll.tolist()


def test_what_is_read_is_counted(tiny: Engine, windows: list[Window]) -> None:
    tiny.cache.clear()
    run = decode_alone(tiny, windows[0], STOCK, tiny.logits(windows[0]))
    layers = len(tiny.spec.moe_layers)
    assert run.choices.shape == (23, layers, tiny.k)
    assert run.counters.lookups == run.choices.size
    assert run.counters.load_bytes == run.load_bytes
    assert run.seconds is not None


def test_shared_scope_cannot_run_in_lockstep(tiny: Engine, windows: list[Window]) -> None:
    with pytest.raises(ValueError, match="scope=session"):
        decode_in_lockstep(tiny, windows, [RoutePolicy(mode="max-rank")])
