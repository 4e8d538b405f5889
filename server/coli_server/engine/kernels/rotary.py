"""Rotary position embedding."""

from numba import njit

from coli_server.engine.kernels.formats import Array


@njit(nogil=True, cache=True)
def rotate_halves_row(x: Array, cos: Array, sin: Array) -> None:
    """Rotate one head in place."""
    half = cos.shape[0]
    for d in range(half):
        a, b = x[d], x[d + half]
        x[d] = a * cos[d] - b * sin[d]
        x[d + half] = b * cos[d] + a * sin[d]


@njit(nogil=True, cache=True)
def rotate_pairs_row(x: Array, cos: Array, sin: Array) -> None:
    """Rotate one head in place, neighbours together."""
    for d in range(cos.shape[0]):
        a, b = x[2 * d], x[2 * d + 1]
        x[2 * d] = a * cos[d] - b * sin[d]
        x[2 * d + 1] = b * cos[d] + a * sin[d]


@njit(nogil=True, cache=True)
def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            if interleaved:
                rotate_pairs_row(x[t, h], cos[t], sin[t])
            else:
                rotate_halves_row(x[t, h], cos[t], sin[t])


def rope(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotate the first 2 * cos.shape[1] dimensions of every head, in place.

    x float32 [tokens, heads, head_dim]; cos, sin float32 [tokens, rotated / 2], one row a token. Dimension d
    turns with d + rotated / 2, or, where `interleaved`, 2 d with 2 d + 1.
    """
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"x {x.shape}, cos {cos.shape} and sin {sin.shape} do not fit together")
    _rotate(x, cos, sin, interleaved)
    return x
