"""Attention over a KV cache: against float64, and the same bits however rows are grouped."""

from __future__ import annotations

import numpy as np
import pytest

from coli_server.engine.kernels import attention
from support.arrays import Array, error, guarded, normal, threads

SHAPES = [
    (1, 1, 4, 4),
    (6, 2, 64, 64),
    (9, 3, 64, 48),
    (8, 8, 20, 33),
    (5, 1, 40, 24),
    (14, 1, 17, 130),
    (16, 4, 8, 200),
]


def reference(
    q: Array, keys: Array, values: Array, seen: list[list[int]], scale: float, sinks: Array | None = None
) -> Array:
    """float64 attention in which row t sees the positions seen[t]."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros((*q.shape[:2], values.shape[2]))
    for t, positions in enumerate(seen):
        for h in range(q.shape[1]):
            z = keys[positions, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            logits = z if sinks is None else np.append(z, np.float64(sinks[h]))
            if len(logits):
                p = np.exp(z - logits.max()) / np.exp(logits - logits.max()).sum()
                out[t, h] = p @ values[positions, h // group].astype(np.float64)
    return out


def inputs(
    q_heads: int, kv_heads: int, dk: int, dv: int, capacity: int, positions: list[int]
) -> tuple[Array, ...]:
    rng = np.random.default_rng(q_heads * dk + dv)
    return (
        normal(rng, len(positions), q_heads, dk),
        normal(rng, capacity, kv_heads, dk),
        normal(rng, capacity, kv_heads, dv),
        np.array(positions, np.int32),
    )


@pytest.mark.parametrize(("q_heads", "kv_heads", "dk", "dv"), SHAPES)
@pytest.mark.parametrize("window", [0, 1, 7, 70])
@pytest.mark.parametrize("sunk", [False, True])
def test_matches_float64(q_heads: int, kv_heads: int, dk: int, dv: int, window: int, sunk: bool) -> None:
    positions = [0, 1, 14, 15, 16, 62, 63, 64, 130, 149]
    q, keys, values, at = inputs(q_heads, kv_heads, dk, dv, 150, positions)
    sinks = np.linspace(-2, 4, q_heads, dtype=np.float32) if sunk else None
    seen = [list(range(max(0, p - window + 1) if window else 0, p + 1)) for p in positions]
    got = attention(q, keys, values, at, 0.3, window=window, sinks=sinks)
    assert error(got, reference(q, keys, values, seen, 0.3, sinks)) < 2e-6


@pytest.mark.parametrize(("q_heads", "kv_heads", "dk", "dv"), SHAPES)
@pytest.mark.parametrize("window", [0, 33])
def test_bits_do_not_depend_on_rows_chunks_capacity_or_threads(
    q_heads: int, kv_heads: int, dk: int, dv: int, window: int
) -> None:
    positions = list(range(100, 190))
    q, keys, values, at = inputs(q_heads, kv_heads, dk, dv, 190, positions)
    with threads(1):
        alone = np.concatenate(
            [
                attention(q[t : t + 1], keys[: p + 1], values[: p + 1], at[t : t + 1], 0.3, window=window)
                for t, p in enumerate(positions)
            ]
        )
        for step in (2, 3, 7, 90):
            for t in range(0, 90, step):
                rows = slice(t, t + step)
                np.testing.assert_array_equal(
                    attention(q[rows], keys, values, at[rows], 0.3, window=window), alone[rows]
                )
    with threads(2):
        np.testing.assert_array_equal(attention(q, keys, values, at, 0.3, window=window), alone)
        np.testing.assert_array_equal(
            attention(q[-1:], keys, values, at[-1:], 0.3, window=window), alone[-1:]
        )


@pytest.mark.parametrize("window", [0, 40])
def test_values_may_be_a_view_of_keys(window: int) -> None:
    q, keys, _, at = inputs(16, 1, 72, 64, 100, [5, 99])
    view = keys[:, :, :64]
    got = attention(q, keys, view, at, 0.2, window=window)
    np.testing.assert_array_equal(got, attention(q, keys, view.copy(), at, 0.2, window=window))


def test_only_listed_positions_that_a_row_sees_count() -> None:
    q, keys, values, at = inputs(6, 2, 24, 24, 300, [0, 99, 200, 299, 299])
    rng = np.random.default_rng(7)
    lists = [[0], [3, 98, 99, 100, 250], list(range(0, 200, 2)), rng.permutation(300)[:131].tolist(), []]
    allowed = np.full((5, 140), -1, np.int32)
    for t, chosen in enumerate(lists):
        allowed[t, : len(chosen)] = chosen
    for window in (0, 120):
        first = [max(0, int(p) - window + 1) if window else 0 for p in at]
        seen = [[j for j in chosen if a <= j <= p] for chosen, a, p in zip(lists, first, at, strict=True)]
        got = attention(q, keys, values, at, 0.3, window=window, allowed=allowed)
        assert error(got, reference(q, keys, values, seen, 0.3)) < 2e-6
        assert (got[4] == 0).all()  # nothing listed
        for t in range(5):
            row = slice(t, t + 1)
            np.testing.assert_array_equal(
                attention(q[row], keys, values, at[row], 0.3, window=window, allowed=allowed[row]), got[row]
            )


def test_what_lies_beyond_a_row_does_not_reach_it() -> None:
    """Rows of a chunk share blocks of positions: later keys and values must not leak, not even a NaN."""
    q, keys, values, at = inputs(4, 2, 16, 16, 80, list(range(60, 80)))
    clean = attention(q, keys, values, at, 0.3)
    keys[70:], values[70:] = np.nan, np.nan
    np.testing.assert_array_equal(attention(q, keys, values, at, 0.3)[:10], clean[:10])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, keys, values, at = inputs(2, 1, 16, 16, 130, [129])
    got = attention(q * 100, keys, values, at, 3.0)
    assert error(got, reference(q * 100, keys, values, [list(range(130))], 3.0)) < 1e-5


@pytest.mark.parametrize(("dk", "dv"), [(5, 3), (16, 16), (50, 70)])
def test_nothing_beyond_the_end_is_touched(dk: int, dv: int) -> None:
    q, keys, values, at = inputs(3, 1, dk, dv, 67, [65, 66])
    out = np.zeros((2, 3, dv), np.float32)
    with guarded(q) as gq, guarded(keys) as gk, guarded(values) as gv, guarded(at) as ga, guarded(out) as go:
        np.testing.assert_array_equal(
            attention(gq, gk, gv, ga, 0.3, out=go), attention(q, keys, values, at, 0.3)
        )


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, keys, values, at = inputs(4, 2, 16, 16, 8, [3])
    for bad in (
        (q[:, :3], keys, values, at),
        (q, keys[:, :, :8], values, at),
        (q, keys, values[:4], at),
        (q, keys, values, at[:0]),
    ):
        with pytest.raises(ValueError, match="fit"):
            attention(*bad, 0.3)
