"""Products of bfloat16 weights with rounded activations. Without the instruction kernels take another way."""

from __future__ import annotations

import numpy as np
import pytest

from coli_server.engine.kernels import Kind, check_bfloat16_dots, lanes, linear
from coli_server.engine.kernels.rounded import HAS_BFLOAT16_DOT
from coli_server.errors import ConfigurationError
from support.arrays import Array, error, normal, rounded, stored, widened

DOT = Kind.BF16_DOT
ODD = [(1, 1, 1), (1, 7, 5), (2, 9, 16), (3, 4, 17), (5, 13, 31), (4, 5, 32), (7, 66, 33), (13, 21, 100)]
ONE = np.array([[0x3F80]], np.uint16)
SMALLEST = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [*ODD, (1, 576, 576), (29, 131, 300), (2, 3, 9001), (9, 5, 20_000)],
)
def test_matches_float64_of_rounded_activations(tokens: int, n: int, k: int) -> None:
    rng = np.random.default_rng(tokens * n + k)
    x, w = normal(rng, tokens, k), stored(normal(rng, n, k), DOT)
    assert error(linear(x, w, DOT), rounded(x).astype(np.float64) @ widened(w, DOT).T) < 1e-6


def test_activations_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    """Every exponent and sign, and what is around the middle of two bfloat16 numbers."""
    high = np.arange(0x0080, 0x7F80, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = np.concatenate([high | low, high | low | 1 << 31]).reshape(-1, 1).view(np.float32)
    np.testing.assert_array_equal(linear(x, ONE, DOT), rounded(x))


def test_what_is_no_number_stays_none() -> None:
    bits = np.array([[0x7F80_0001], [0x7FFF_FFFF], [0xFFFF_FFFF], [0xFF80_8000]], np.uint32)
    assert np.isnan(linear(bits.view(np.float32), ONE, DOT)).all()
    ends = np.array([[np.inf], [-np.inf], [3.4e38]], np.float32)
    np.testing.assert_array_equal(linear(ends, ONE, DOT)[:, 0], rounded(ends[:, 0]))


def test_zeros_are_zero_and_denormals_next_to_nothing() -> None:
    """The instruction takes denormals as zeros; what it makes of normal numbers is not lost beside them."""
    tiny = np.full((7, 77), SMALLEST / 4, np.float32)
    assert (linear(np.zeros((7, 77), np.float32), stored(tiny, DOT), DOT) == 0).all()
    assert (np.abs(linear(tiny, stored(np.ones((5, 77), np.float32), DOT), DOT)) <= 77 * SMALLEST).all()
    tiny[:, 50] = 1
    np.testing.assert_array_equal(linear(tiny, stored(np.ones((5, 77), np.float32), DOT), DOT), 1)


@pytest.mark.parametrize("odd", [0, 1])
def test_order_of_summation_is_sixteen_lanes_of_pairs_and_a_tree(odd: int) -> None:
    """Exact products, one of each pair zero, make every rounding that of an addition."""
    rng = np.random.default_rng(2)
    x = rng.integers(-8, 9, (1, 75)).astype(np.float32)
    w = (rng.integers(-8, 9, (5, 75)) * 2.0 ** rng.integers(-12, 3, (5, 75))).astype(np.float32)
    w[:, 1 - odd :: 2] = 0
    products = np.zeros((5, 96), np.float32)
    products[:, :75] = w * x
    sums = np.zeros((5, 16), np.float32)
    for step in range(0, 96, 32):
        sums += products[:, step + odd : step + 32 : 2]
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    np.testing.assert_array_equal(linear(x, stored(w, DOT), DOT)[0], sums[:, 0])


def test_a_row_has_the_same_bits_wherever_it_stands() -> None:
    """Long rows, every number of rows up to two turns of the tallest tiles and more, every place in them."""
    rng = np.random.default_rng(3)
    x, w = normal(rng, 1, 4097), stored(normal(rng, 6, 4097), DOT)
    alone = linear(x, w, DOT)
    for rows in range(1, 27):
        many: Array = np.repeat(x, rows, axis=0)
        np.testing.assert_array_equal(linear(many, w, DOT), np.repeat(alone, rows, axis=0))


def test_a_processor_without_the_instruction_is_told_so() -> None:
    check_bfloat16_dots({"avx512bf16", "avx512bw", "avx512vl", "avx2"})
    with pytest.raises(ConfigurationError, match=r"COLI_ACTIVATIONS=bfloat16 needs .* AVX512-BF16.* float32"):
        check_bfloat16_dots({"avx512bw", "avx512vl", "avx2"})
    if HAS_BFLOAT16_DOT:
        check_bfloat16_dots(lanes.host_features())
    else:
        with pytest.raises(ConfigurationError):
            check_bfloat16_dots()
