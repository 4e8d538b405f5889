"""Rotary position embedding."""

from numba import njit

from coli_server.engine.kernels.formats import Array


@njit(nogil=True, cache=True)
def _rotate_halves(x: Array, cos: Array, sin: Array) -> None:
    half = cos.shape[1]
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(half):
                a, b = x[t, h, d], x[t, h, d + half]
                x[t, h, d] = a * cos[t, d] - b * sin[t, d]
                x[t, h, d + half] = b * cos[t, d] + a * sin[t, d]


@njit(nogil=True, cache=True)
def _rotate_pairs(x: Array, cos: Array, sin: Array) -> None:
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(cos.shape[1]):
                a, b = x[t, h, 2 * d], x[t, h, 2 * d + 1]
                x[t, h, 2 * d] = a * cos[t, d] - b * sin[t, d]
                x[t, h, 2 * d + 1] = b * cos[t, d] + a * sin[t, d]


def rope(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotate the first 2 * cos.shape[1] dimensions of every head, in place.

    x float32 [tokens, heads, head_dim]; cos, sin float32 [tokens, rotated / 2], one row a token. Dimension d
    turns with d + rotated / 2, or, where `interleaved`, 2 d with 2 d + 1.
    """
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"x {x.shape}, cos {cos.shape} and sin {sin.shape} do not fit together")
    (_rotate_pairs if interleaved else _rotate_halves)(x, cos, sin)
    return x
