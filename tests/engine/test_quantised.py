"""Quantised weights: products as those of a float32 matrix of the weights that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli_server.engine.kernels import ExpertShape, Kind, experts_ffn, linear, row_bytes
from coli_server.engine.kernels.dots import HAS_INTEGER_DOT
from coli_server.engine.kernels.formats import code_bytes
from coli_server.engine.quantised import dequantise, pack, quantise
from support.arrays import Array, error, guarded, normal, threads

KINDS = tuple(kind for kind in Kind if kind.quantised)
ODD = [(1, 1, 1), (1, 7, 5), (2, 9, 16), (3, 4, 17), (5, 13, 31), (6, 8, 64), (7, 66, 33), (13, 21, 100)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "n", "k"), [*ODD, (1, 9, 48), (1, 33, 576), (29, 31, 300), (2, 3, 9001)])
def test_products_are_those_of_the_dequantised_matrix(tokens: int, n: int, k: int, kind: Kind) -> None:
    rng = np.random.default_rng(tokens * n + k)
    x, rows = normal(rng, tokens, k), quantise(normal(rng, n, k), kind)
    want = x.astype(np.float64) @ dequantise(rows, kind, k).astype(np.float64).T
    assert error(linear(x, rows, kind), want) < (5e-5 if HAS_INTEGER_DOT else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_and_sign_of_scale_is_exact(kind: Kind) -> None:
    """Against float64 from the codes themselves, not from `dequantise`."""
    rng = np.random.default_rng(1)
    low, high = (-127, 127) if kind.bits == 8 else (-8, 7)
    codes = rng.integers(low, high + 1, (40, 200)).astype(np.int8)
    codes[:, 0], codes[:, 1], codes[3] = low, high, 0
    scales = (rng.integers(-7, 8, (40, -(-200 // kind.group))) * 2.0**-5).astype(np.float32)
    weights = codes * np.repeat(scales.astype(np.float64), kind.group, axis=1)[:, :200]
    rows = pack(codes, scales, kind)
    np.testing.assert_array_equal(dequantise(rows, kind, 200), weights)
    x = rng.integers(-4, 5, (3, 200)).astype(np.float32)
    x[:, ::10] = 4  # the scale of every block: others are off by less than half a 32,639th of it
    assert error(linear(x, rows, kind), x.astype(np.float64) @ weights.T) < 2e-6 + 8 / 32639 / 200**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_rows_columns_or_threads(kind: Kind) -> None:
    rng = np.random.default_rng(2)
    x, rows = normal(rng, 29, 203), quantise(normal(rng, 150, 203), kind)
    with threads(1):
        alone = np.concatenate([linear(x[t : t + 1], rows, kind) for t in range(len(x))])
        for count in range(2, len(x) + 1):
            np.testing.assert_array_equal(linear(x[:count], rows, kind), alone[:count])
        for start in range(9):
            np.testing.assert_array_equal(linear(x, rows[start:], kind), alone[:, start:])
    with threads(2):
        np.testing.assert_array_equal(linear(x, rows, kind), alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 7), (8, 16), (13, 50)])
def test_nothing_beyond_the_end_is_touched(n: int, k: int, kind: Kind) -> None:
    rng = np.random.default_rng(3)
    x, rows = normal(rng, 3, k), quantise(normal(rng, n, k), kind)
    with guarded(x) as gx, guarded(rows) as grows:
        np.testing.assert_array_equal(linear(gx, grows, kind), linear(x, rows, kind))


@pytest.mark.parametrize("kind", [Kind.I8_32, Kind.I8_64, Kind.I4_32, Kind.I4_128])
@pytest.mark.parametrize(("d", "f"), [(6, 5), (64, 32), (33, 20), (130, 71)])
def test_experts_are_those_of_dequantised_ones(d: int, f: int, kind: Kind) -> None:
    rng = np.random.default_rng(d + f)
    shapes = [(f, d), (f, d), (d, f)]
    parts = [quantise(normal(rng, *shape), kind) for shape in shapes]
    plain = [dequantise(part, kind, shape[1]) for part, shape in zip(parts, shapes, strict=True)]
    x = normal(rng, 9, d)
    quantised = _experts(x, ExpertShape(kind, d, f, 0, parts[0].nbytes, 2 * parts[0].nbytes), parts)
    size = plain[0].nbytes
    wide = _experts(x, ExpertShape(Kind.F32, d, f, 0, size, 2 * size), plain)
    assert error(quantised, wide.astype(np.float64)) < (1e-4 if HAS_INTEGER_DOT else 1e-6)


def _experts(x: Array, shape: ExpertShape, parts: list[Array]) -> Array:
    """One expert run for one row and for all others together, float32 [rows, d]."""
    slot = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    rows, at = np.arange(len(x), dtype=np.int32), np.full(2, slot.ctypes.data, np.int64)
    h, y = np.empty((len(x), shape.hidden), np.float32), np.empty_like(x)
    return experts_ffn(x, rows, np.array([0, 1, len(x)], np.int32), at, shape, h, y, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_long_as_documented(kind: Kind) -> None:
    for k in (1, 15, 16, 17, 31, 32, 33, 64, 100, 576):
        step, share = (16, 16) if kind.bits == 8 else (32, 16)
        assert code_bytes(kind, k) == -(-k // step) * share
        assert row_bytes(kind, k) == code_bytes(kind, k) + 2 * -(-k // kind.group)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_error_is_within_half_a_code(kind: Kind, n: int, k: int, seed: int) -> None:
    weights = normal(np.random.default_rng(seed), n, k)
    back = dequantise(quantise(weights, kind), kind, k)
    largest = float(np.abs(weights).max())
    assert np.abs(back - weights).max() <= largest * (0.5 / 127 + 0.005 if kind.bits == 8 else 0.5)
    assert np.square(back - weights).sum() <= np.square(weights).sum() * (1e-3 if kind.bits == 8 else 0.04)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_scales_by_error_beat_scales_by_the_maximum(group: int) -> None:
    kind = Kind.of(4, group)
    weights = normal(np.random.default_rng(4), 64, 512)
    largest = np.abs(weights.reshape(64, -1, group)).max(axis=2)
    scales = np.repeat(largest / 7, group, axis=1)
    plain = np.clip(np.rint(weights / scales), -8, 7) * scales
    chosen = dequantise(quantise(weights, kind), kind, 512)
    assert np.square(chosen - weights).sum() < 0.85 * np.square(plain - weights).sum()


def test_zeros_and_tiny_weights_stay_finite() -> None:
    weights = np.zeros((3, 64), np.float32)
    weights[1], weights[2, 5] = 1e-40, 3e-39
    for kind in KINDS:
        back = dequantise(quantise(weights, kind), kind, 64)
        assert np.isfinite(back).all()
        assert (back[0] == 0).all()
        assert np.abs(back).max() <= 4e-39


def test_weights_that_are_not_finite_are_refused() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="finite"):
            quantise(np.full((1, 4), bad, np.float32), Kind.I8_32)


def test_kinds_are_found_by_bits_and_group() -> None:
    assert [Kind.of(kind.bits, kind.group) for kind in KINDS] == list(KINDS)
    with pytest.raises(ValueError, match="groups of 16"):
        Kind.of(4, 16)
