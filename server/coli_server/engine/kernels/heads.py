"""Between the projection of a token and its attention: norms, clipping, rotation, and the KV cache."""

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from coli_server.engine.kernels.formats import Array
from coli_server.engine.kernels.norms import rms_norm_row
from coli_server.engine.kernels.rotary import rotate_halves_row, rotate_pairs_row
from coli_server.engine.kernels.tiles import address, copy_floats

_NONE: Array = np.zeros(0, np.float32)


@dataclass(frozen=True)
class HeadShape:
    """What one row of the projection holds, query heads, key heads and value heads behind each other, and
    what happens to them.

    `q_norm` and `k_norm` are RMS weights, float32, over one head or over all heads together (None: no norm);
    behind the norm everything is clipped to +-`clip`; then queries and keys are rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Array | None = None
    k_norm: Array | None = None
    eps: float = 0.0
    clip: float | None = None
    interleaved: bool = False
    counts: Array = field(init=False, repr=False, compare=False)
    """int64 [4], what the kernel reads."""
    scalars: Array = field(init=False, repr=False, compare=False)
    """float32 [2]: eps and clip."""
    norms: tuple[Array, Array] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = np.array([self.heads, self.kv_heads, self.head_dim, self.interleaved], np.int64)
        clip = np.inf if self.clip is None else self.clip
        norms = tuple(_NONE if norm is None else norm for norm in (self.q_norm, self.k_norm))
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "scalars", np.array([self.eps, clip], np.float32))
        object.__setattr__(self, "norms", norms)


@njit(nogil=True, cache=True)
def _normalise(x: Array, norm: Array, eps: float) -> None:
    """RMS norm of one row's heads in place, head by head or all together, as the weight is long."""
    if norm.shape[0] > 0:
        for first in range(0, x.shape[0], norm.shape[0]):
            part = x[first : first + norm.shape[0]]
            rms_norm_row(part, norm, eps, part)


@njit(nogil=True, cache=True)
def _clip(x: Array, limit: float) -> None:
    for i in range(x.shape[0]):
        if x[i] > limit:
            x[i] = limit
        elif x[i] < -limit:
            x[i] = -limit


@njit(nogil=True, cache=True)
def _rotate(x: Array, size: int, cos: Array, sin: Array, interleaved: bool) -> None:
    for first in range(0, x.shape[0], size):
        if interleaved:
            rotate_pairs_row(x[first : first + size], cos, sin)
        else:
            rotate_halves_row(x[first : first + size], cos, sin)


@njit(nogil=True, cache=True)
def _split_heads(
    qkv: Array,
    counts: Array,
    scalars: Array,
    q_norm: Array,
    k_norm: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    bases: Array,
    q: Array,
) -> None:
    size = counts[2]
    keys = counts[0] * size
    width = counts[1] * size
    for t in range(qkv.shape[0]):
        row = qkv[t]
        _normalise(row[:keys], q_norm, scalars[0])
        _normalise(row[keys : keys + width], k_norm, scalars[0])
        if scalars[1] < np.inf:
            _clip(row, scalars[1])
        if cos.shape[1] > 0:
            _rotate(row[: keys + width], size, cos[t], sin[t], counts[3] != 0)
        at = 4 * width * positions[t]
        copy_floats(address(row), address(q) + t * q.strides[0], keys)
        copy_floats(address(row) + 4 * keys, bases[t, 0] + at, width)
        copy_floats(address(row) + 4 * (keys + width), bases[t, 1] + at, width)


_NO_ANGLES: Array = np.zeros((0, 0), np.float32)


def split_heads(
    qkv: Array, shape: HeadShape, angles: tuple[Array, Array] | None, positions: Array, bases: Array
) -> Array:
    """Queries float32 [tokens, heads, head_dim] of the rows `qkv`, float32 [tokens, width], which change;
    keys and values go into their caches.

    `angles` are cosines and sines, each float32 [tokens, rotated / 2]; positions int32 [tokens]; `bases`
    int64 [tokens, 2] where each row's caches of keys and of values begin, float32 [capacity, kv_heads,
    head_dim]. Addresses and positions are trusted.
    """
    q = np.empty((len(qkv), shape.heads, shape.head_dim), np.float32)
    cos, sin = (_NO_ANGLES, _NO_ANGLES) if angles is None else angles
    q_norm, k_norm = shape.norms
    _split_heads(qkv, shape.counts, shape.scalars, q_norm, k_norm, cos, sin, positions, bases, q)
    return q
