"""Products with stored weights: against float64, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit, types
from numba.extending import intrinsic

from coli_server.engine.kernels import Kind, lanes, linear, linear_heads
from coli_server.engine.kernels.tiles import address
from coli_server.engine.quantised import dequantise, quantise
from support.arrays import Array, error, guarded, normal, stored, threads, widened

KINDS = (Kind.BF16, Kind.F16, Kind.F32)
ALL_PLAIN = (*KINDS, Kind.BF16_DOT)
ODD = [(1, 1, 1), (1, 7, 5), (2, 9, 16), (3, 4, 17), (5, 13, 31), (6, 8, 64), (7, 66, 33), (13, 21, 100)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "n", "k"), [*ODD, (1, 576, 576), (29, 131, 300), (2, 3, 9001)])
def test_matches_float64(tokens: int, n: int, k: int, kind: int) -> None:
    rng = np.random.default_rng(tokens * n + k)
    x, w = normal(rng, tokens, k), stored(normal(rng, n, k), kind)
    assert error(linear(x, w, kind), x.astype(np.float64) @ widened(w, kind).T) < 1e-6


@pytest.mark.parametrize("kind", ALL_PLAIN)
def test_bits_do_not_depend_on_rows_tiles_columns_or_threads(kind: int) -> None:
    rng = np.random.default_rng(1)
    x, w = normal(rng, 29, 203), stored(normal(rng, 150, 203), kind)
    with threads(1):
        alone = np.concatenate([linear(x[t : t + 1], w, kind) for t in range(len(x))])
        for rows in range(2, len(x) + 1):
            np.testing.assert_array_equal(linear(x[:rows], w, kind), alone[:rows])
            np.testing.assert_array_equal(linear(x[-rows:], w, kind), alone[-rows:])
        for start in range(9):
            np.testing.assert_array_equal(linear(x, w[start:], kind), alone[:, start:])
    with threads(2):
        np.testing.assert_array_equal(linear(x, w, kind), alone)
        np.testing.assert_array_equal(linear(x[:1], w, kind), alone[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_summation_is_sixteen_lanes_and_a_tree(kind: int) -> None:
    """The documented order, spelled out: exact products make every rounding that of an addition."""
    rng = np.random.default_rng(2)
    x = rng.integers(-8, 9, (1, 75)).astype(np.float32)
    w = stored((rng.integers(-8, 9, (5, 75)) * 2.0 ** rng.integers(-12, 3, (5, 75))).astype(np.float32), kind)
    products = np.zeros((5, 80), np.float32)
    products[:, :75] = widened(w, kind) * x
    sums = np.zeros((5, 16), np.float32)
    for step in range(0, 80, 16):
        sums += products[:, step : step + 16]
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    np.testing.assert_array_equal(linear(x, w, kind)[0], sums[:, 0])


@pytest.mark.parametrize("kind", ALL_PLAIN)
def test_rows_of_weights_at_any_stride(kind: int) -> None:
    rng = np.random.default_rng(3)
    x, wide = normal(rng, 3, 40), stored(normal(rng, 22, 57), kind)
    np.testing.assert_array_equal(linear(x, wide[::2, :40], kind), linear(x, wide[::2, :40].copy(), kind))


@pytest.mark.parametrize("kind", ALL_PLAIN)
@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 7), (8, 16), (13, 50)])
def test_nothing_beyond_the_end_is_touched(tokens: int, n: int, k: int, kind: int) -> None:
    rng = np.random.default_rng(4)
    x, w = normal(rng, tokens, k), stored(normal(rng, n, k), kind)
    out = np.zeros((tokens, n), np.float32)
    with guarded(x) as gx, guarded(w) as gw, guarded(out) as gout:
        np.testing.assert_array_equal(linear(gx, gw, kind, None, gout), linear(x, w, kind))


def test_denormals_zeros_and_infinities_survive() -> None:
    x = np.array([[1.0, 1.0]], np.float32)
    w = np.array([[1e-40, 0.0], [np.inf, 1.0], [np.nan, 1.0], [0.0, 0.0], [-3e-45, 0.0]], np.float32)
    np.testing.assert_array_equal(
        linear(x, w, Kind.F32)[0], np.array([1e-40, np.inf, np.nan, 0, -3e-45], np.float32)
    )
    assert (linear(np.zeros((4, 33), np.float32), w[:, :1].repeat(33, 1)[3:4], Kind.F32) == 0).all()


def test_bias_is_added_last() -> None:
    rng = np.random.default_rng(5)
    x, w, bias = normal(rng, 3, 20), normal(rng, 7, 20), normal(rng, 7)
    np.testing.assert_array_equal(linear(x, w, Kind.F32, bias), linear(x, w, Kind.F32) + bias)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.BF16_DOT])
@pytest.mark.parametrize("count", [1, 2])
def test_heads_give_the_bits_of_one_product_each(count: int, kind: Kind) -> None:
    rng = np.random.default_rng(6)
    x, w = normal(rng, 5, 3, 70), stored(normal(rng, 5, 130, 70), kind)
    with threads(count):
        got = linear_heads(x, w, kind)
        np.testing.assert_array_equal(got, np.stack([linear(a, b, kind) for a, b in zip(x, w, strict=True)]))


@pytest.mark.parametrize(
    ("x", "w", "out"), [((2, 3), (4, 5), (2, 4)), ((2, 3), (4, 3), (2, 5)), ((2, 3), (4, 3), (1, 4))]
)
def test_shapes_that_do_not_fit_are_refused(
    x: tuple[int, int], w: tuple[int, int], out: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        linear(np.zeros(x, np.float32), np.zeros(w, np.float32), Kind.F32, None, np.zeros(out, np.float32))


def _widen_halves(native: bool) -> object:
    @intrinsic
    def widen(_context: object, source: object, target: object) -> object:  # noqa: ARG001
        def generate(context: object, b: object, _signature: object, args: tuple[object, object]) -> object:
            bits = lanes.load(b, args[0], lanes.vector(lanes.I16))
            lanes.store(b, lanes.float16_to_float32(b, bits, native), args[1])
            return context.get_dummy_value()  # type: ignore[attr-defined]

        return types.void(types.int64, types.int64), generate

    return widen


_BY_INTEGERS = _widen_halves(False)


@njit
def _widen_all(bits: Array, out: Array) -> None:
    for i in range(0, bits.shape[0], 16):
        _BY_INTEGERS(address(bits) + 2 * i, address(out) + 4 * i)


def test_float16_by_integer_arithmetic_is_exact_for_all_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    _widen_all(bits, out)
    want = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(
        out.view(np.uint32)[numbers], want.view(np.uint32)[numbers]
    )  # signs of zero


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F16])
def test_every_stored_value_is_read_exactly(kind: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = widened(bits, kind).astype(np.float32)[:, 0]
    got = linear(np.ones((1, 1), np.float32), bits, kind)[0]
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.F32])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 31, 70])
def test_an_activation_that_is_no_number_shows_in_every_result(kind: Kind, bad: float, at: int) -> None:
    rng = np.random.default_rng(7)
    x, w = (
        normal(rng, 2, 71),
        quantise(normal(rng, 9, 71), kind) if kind.quantised else stored(np.ones((9, 71), np.float32), kind),
    )
    x[1, at] = bad
    got = linear(x, w, kind)
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1]).any()


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.F32])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-33, 1e-20, 1e20, 1e35])
def test_activations_of_any_size(kind: Kind, size: float) -> None:
    """Blocks of next to nothing count as zeros, and no size overflows on the way."""
    rng = np.random.default_rng(8)
    x, plain = (normal(rng, 2, 130) * np.float32(size)).astype(np.float32), normal(rng, 9, 130)
    w = quantise(plain, kind) if kind.quantised else stored(plain, kind)
    weights = dequantise(w, kind, 130).astype(np.float64) if kind.quantised else widened(w, kind)
    want = x.astype(np.float64) @ weights.T
    share = 4e-3 if kind == Kind.BF16_DOT else 6e-5
    np.testing.assert_allclose(linear(x, w, kind), want, atol=1e-28 + share * np.abs(want).max(), rtol=0)
