"""Row-wise functions: norms, gated activation, the weighted sum of expert outputs."""

import numpy as np
from numba import njit

from coli_server.engine.kernels.formats import Array
from coli_server.engine.kernels.tiles import SILU, address, lane_sum, lane_sum_squares


@njit(nogil=True, cache=True)
def rms_norm_row(x: Array, weight: Array, eps: float, out: Array) -> None:
    """RMS norm of one row, contiguous float32 [width]; out may be x."""
    width = x.shape[0]
    mean = lane_sum_squares(address(x), width) / np.float32(width)
    factor = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    for d in range(width):
        out[d] = x[d] * factor * weight[d]


@njit(nogil=True, cache=True)
def _rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    for t in range(x.shape[0]):
        rms_norm_row(x[t], weight, eps, out[t])


@njit(nogil=True, cache=True)
def _add_rms_norm(x: Array, y: Array, multiplier: float, weight: Array, eps: float, out: Array) -> None:
    for t in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[t, d] += y[t, d] * multiplier
        rms_norm_row(x[t], weight, eps, out[t])


@njit(nogil=True, cache=True)
def _layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    rows, width = x.shape
    xp, op = address(x), address(out)
    for t in range(rows):
        mean = lane_sum(xp + t * x.strides[0], width) / np.float32(width)
        for d in range(width):
            out[t, d] = x[t, d] - mean
        variance = lane_sum_squares(op + t * out.strides[0], width) / np.float32(width)
        factor = np.float32(1.0) / np.sqrt(variance + np.float32(eps))
        for d in range(width):
            out[t, d] = out[t, d] * factor * weight[d] + bias[d]


@njit(nogil=True, cache=True)
def _silu_mul(gate: Array, up: Array, out: Array) -> None:
    SILU(address(gate), address(up), address(out), gate.size, np.float32(0), np.float32(0))


@njit(nogil=True, cache=True)
def _combine(y: Array, weights: Array, out: Array) -> None:
    tokens, k = weights.shape
    for t in range(tokens):
        for r in range(k):
            weight = weights[t, r]
            for d in range(out.shape[1]):
                out[t, d] += weight * y[t * k + r, d]


def rms_norm(x: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
    """out = x / sqrt(mean(x ** 2) + eps) * weight, row by row.

    x, out float32 [rows, width] (out may be x, and is made if None), weight float32 [width].
    """
    out = np.empty_like(x) if out is None else out
    if x.shape != out.shape or weight.shape[0] != x.shape[1]:
        raise ValueError(f"x {x.shape}, weight {weight.shape} and out {out.shape} do not fit together")
    _rms_norm(x, weight, eps, out)
    return out


def add_rms_norm(x: Array, y: Array, multiplier: np.float32, weight: Array, eps: float) -> Array:
    """x += y * multiplier, in place, and the RMS norm of that, in one pass.

    x, y float32 [rows, width], weight float32 [width]; nothing is checked.
    """
    out = np.empty_like(x)
    _add_rms_norm(x, y, multiplier, weight, eps, out)
    return out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array | None = None) -> Array:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row.

    x, out float32 [rows, width] (out may be x, and is made if None), weight and bias float32 [width].
    """
    out = np.empty_like(x) if out is None else out
    if x.shape != out.shape or weight.shape[0] != x.shape[1] or bias.shape != weight.shape:
        raise ValueError(f"x {x.shape}, weight {weight.shape}, bias {bias.shape}, out {out.shape} do not fit")
    _layer_norm(x, weight, bias, eps, out)
    return out


def silu_mul(gate: Array, up: Array, out: Array) -> Array:
    """out = silu(gate) * up, element by element: float32 arrays of one shape (out may be an input)."""
    if gate.shape != up.shape or gate.shape != out.shape:
        raise ValueError(f"gate {gate.shape}, up {up.shape} and out {out.shape} must have one shape")
    _silu_mul(gate, up, out)
    return out


def combine(y: Array, weights: Array, out: Array) -> Array:
    """out[t] += the sum over r, in order, of weights[t, r] * y[t * k + r].

    y float32 [tokens * k, width], weights float32 [tokens, k], out float32 [tokens, width].
    """
    if y.shape != (weights.size, out.shape[1]) or weights.shape[0] != out.shape[0]:
        raise ValueError(f"y {y.shape}, weights {weights.shape} and out {out.shape} do not fit together")
    _combine(y, weights, out)
    return out
