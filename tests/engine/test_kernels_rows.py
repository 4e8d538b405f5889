"""Norms, rotary embedding, gated activation, weighted sums: against float64, and row by row."""

from __future__ import annotations

import numpy as np
import pytest

from coli_server.engine.kernels import combine, layer_norm, rms_norm, rope, silu_mul
from support.arrays import error, guarded, normal

WIDTHS = [1, 5, 16, 33, 128, 2049]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = normal(rng, 7, width), normal(rng, width)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    got = rms_norm(x, weight, 1e-5)
    assert error(got, want) < 1e-6
    np.testing.assert_array_equal(rms_norm(x[4:5], weight, 1e-5), got[4:5])
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-5, x), got)  # in place


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight, bias = normal(rng, 7, width) + 3, normal(rng, width), normal(rng, width)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    got = layer_norm(x, weight, bias, 1e-5)
    assert error(got, want) < 2e-6
    np.testing.assert_array_equal(layer_norm(x[4:5], weight, bias, 1e-5), got[4:5])
    np.testing.assert_array_equal(layer_norm(x, weight, bias, 1e-5, x), got)


def test_norms_of_zeros_are_zero_and_of_tiny_rows_finite() -> None:
    zeros, ones = np.zeros((2, 20), np.float32), np.ones(20, np.float32)
    assert (rms_norm(zeros, ones, 1e-6) == 0).all()
    assert (layer_norm(zeros, ones, zeros[0], 1e-6) == 0).all()
    assert np.isfinite(rms_norm(zeros + np.float32(1e-42), ones, 1e-6)).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "size", "half"), [(1, 2, 1), (3, 10, 3), (2, 64, 32), (5, 128, 16)])
def test_rope(heads: int, size: int, half: int, interleaved: bool) -> None:
    rng = np.random.default_rng(size)
    x, angles = normal(rng, 4, heads, size), rng.random((4, half)) * 6
    want = x.astype(np.float64)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = want[:, :, first].copy(), want[:, :, second].copy()
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    want[:, :, first], want[:, :, second] = a * cos - b * sin, b * cos + a * sin
    got = rope(x.copy(), np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved)
    assert error(got, want) < 1e-6
    np.testing.assert_array_equal(got[:, :, 2 * half :], x[:, :, 2 * half :])


@pytest.mark.parametrize("size", [1, 15, 16, 100])
def test_silu_mul_over_the_whole_range(size: int) -> None:
    rng = np.random.default_rng(size)
    gate, up = (normal(rng, 3, size) * 30 for _ in range(2))
    gate[0, 0], gate[1, 0], gate[2, 0] = -200, 200, 0
    wide = gate.astype(np.float64)
    want = wide / (1 + np.exp(-wide)) * up
    with guarded(gate) as g, guarded(up) as u, guarded(np.zeros_like(up)) as out:
        np.testing.assert_allclose(silu_mul(g, u, out), want, rtol=1e-6, atol=1e-30)


def test_silu_of_what_is_not_finite() -> None:
    gate = np.array([[np.nan, np.inf, -np.inf, -1e30, 1e30]], np.float32)
    got = silu_mul(gate, np.ones_like(gate), np.empty_like(gate))[0]
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert np.isnan(got[2])  # -inf * 0, as the formula has it
    assert got[3] == 0
    assert got[4] == np.float32(1e30)


@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 1), (3, 4, 17), (6, 8, 200)])
def test_combine_adds_in_rank_order(tokens: int, k: int, width: int) -> None:
    rng = np.random.default_rng(width)
    y, weights, out = normal(rng, tokens * k, width), normal(rng, tokens, k), normal(rng, tokens, width)
    want = out.copy()
    for r in range(k):
        want += weights[:, r : r + 1] * y.reshape(tokens, k, width)[:, r]
    np.testing.assert_array_equal(combine(y, weights, out), want)


def test_shapes_that_do_not_fit_are_refused() -> None:
    row = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(row, row[0, :3], 1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        layer_norm(row, row[0], row[0, :3], 1e-6)
    with pytest.raises(ValueError, match="one shape"):
        silu_mul(row, row, row[:1])
    with pytest.raises(ValueError, match="do not fit"):
        combine(row, row[:, :2], row)
    with pytest.raises(ValueError, match="do not fit"):
        rope(row.reshape(2, 1, 4), row, row)
