"""Products of activations with weight matrices stored as the checkpoint has them."""

from typing import Any

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.formats import TAGS
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    STACK_8,
    STACK_16,
    TILE_1X4,
    TILE_1X8,
    TILE_2X4,
    TILE_4X4,
    TILE_6X4,
    put_address,
)

Array = np.ndarray[Any, Any]

ROWS_AT_ONCE = 12
"""Rows of x that meet a panel of weights together: two tall tiles, few enough to stay in the first cache."""

_PANEL = 64
"""Weight rows that meet all rows of x, 12 at a time, before the next: they stay in the second cache."""

SERIAL_WORK = 150_000
"""Multiplications below which starting the second thread costs more than it saves."""

NO_BIAS: Array = np.zeros(0, np.float32)


@njit(nogil=True, cache=True)
def tiles_of_four(tag, xs, ws, ys, rows, k, valid):  # type: ignore[no-untyped-def]
    """Products of all `rows` rows with four weight rows, by the tallest tiles that fit."""
    i = 0
    while i + 6 <= rows:
        TILE_6X4(tag, xs + 8 * i, ws, ys + 8 * i, k, valid)
        i += 6
    if i + 4 <= rows:
        TILE_4X4(tag, xs + 8 * i, ws, ys + 8 * i, k, valid)
        i += 4
    if i + 2 <= rows:
        TILE_2X4(tag, xs + 8 * i, ws, ys + 8 * i, k, valid)
        i += 2
    if i < rows:
        TILE_1X4(tag, xs + 8 * i, ws, ys + 8 * i, k, valid)


@njit(nogil=True, cache=True)
def _one_row(tag, x, w, w_stride, k, y, start, stop):  # type: ignore[no-untyped-def]
    """y[start:stop] for one row of x: eight weight rows at a time keep the memory busy."""
    xs, ws, ys = STACK_8(), STACK_8(), STACK_8()
    put_address(xs, 0, x)
    n = start
    while n + 8 <= stop:
        for j in range(8):
            put_address(ws, j, w + (n + j) * w_stride)
        put_address(ys, 0, y + 4 * n)
        put_address(ys, 1, y + 4 * n + 16)
        TILE_1X8(tag, xs, ws, ys, k, 4)
        n += 8
    while n < stop:
        valid = min(4, stop - n)
        for j in range(4):
            put_address(ws, j, w + (n + min(j, valid - 1)) * w_stride)
        put_address(ys, 0, y + 4 * n)
        TILE_1X4(tag, xs, ws, ys, k, valid)
        n += 4


@njit(nogil=True, cache=True)
def _block(tag, x, rows, w, w_stride, k, y, y_stride, start, stop):  # type: ignore[no-untyped-def]
    """y[:rows, start:stop]; all but the last of several blocks must be a multiple of 4 wide."""
    if rows == 1:
        _one_row(tag, x, w, w_stride, k, y, start, stop)
        return
    xs, ws, ys = STACK_16(), STACK_8(), STACK_16()
    for panel in range(start, stop, _PANEL):
        panel_stop = min(stop, panel + _PANEL)
        for first in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - first)
            for i in range(count):
                put_address(xs, i, x + (first + i) * k * 4)
            for n in range(panel, panel_stop, 4):
                valid = min(4, stop - n)
                for j in range(4):
                    put_address(ws, j, w + (n + min(j, valid - 1)) * w_stride)
                for i in range(count):
                    put_address(ys, i, y + (first + i) * y_stride + 4 * n)
                tiles_of_four(tag, xs, ws, ys, count, k, valid)


@njit(nogil=True, cache=True)
def _add_bias(out, bias):  # type: ignore[no-untyped-def]
    for t in range(out.shape[0]):
        for n in range(out.shape[1]):
            out[t, n] += bias[n]


@njit(nogil=True, cache=True, parallel=True)
def _linear(tag, x, w, bias, out, parts):  # type: ignore[no-untyped-def]
    rows, k = x.shape
    n = w.shape[0]
    xp, wp, yp = x.ctypes.data, w.ctypes.data, out.ctypes.data
    w_stride, y_stride = w.strides[0], out.strides[0]
    if parts == 1 or rows * n * k < SERIAL_WORK:
        _block(tag, xp, rows, wp, w_stride, k, yp, y_stride, 0, n)
    else:
        width = (n + parts * 8 - 1) // (parts * 8) * 8
        for part in prange(parts):
            start, stop = part * width, min(n, (part + 1) * width)
            if start < stop:
                _block(tag, xp, rows, wp, w_stride, k, yp, y_stride, start, stop)
    if bias.shape[0] > 0:
        _add_bias(out, bias)


def linear(x: Array, w: Array, kind: int, bias: Array | None = None, out: Array | None = None) -> Array:
    """x @ w.T + bias.

    x float32 [tokens, k], C-contiguous; w [n, k] as `kind` says, its rows at any stride; bias float32 [n] or
    None; out float32 [tokens, n], C-contiguous, made if None. An element depends only on its rows of x and w.

    Raises ValueError where the shapes do not fit together.
    """
    if out is None:
        out = np.empty((x.shape[0], w.shape[0]), np.float32)
    if x.shape[1] != w.shape[1] or out.shape != (x.shape[0], w.shape[0]):
        raise ValueError(f"x {x.shape}, w {w.shape} and out {out.shape} do not fit together")
    _linear(TAGS[kind], x, w, NO_BIAS if bias is None else bias, out, thread_count())
    return out


@njit(nogil=True, cache=True, parallel=True)
def _linear_heads(tag, x, w, out, serial):  # type: ignore[no-untyped-def]
    heads, rows, k = x.shape
    n = w.shape[1]
    xp, wp, yp = x.ctypes.data, w.ctypes.data, out.ctypes.data
    x_size, w_size, y_size = x.strides[0], w.strides[0], out.strides[0]
    w_stride, y_stride = w.strides[1], out.strides[1]
    if serial or heads * rows * n * k < SERIAL_WORK:
        for h in range(heads):
            _block(tag, xp + h * x_size, rows, wp + h * w_size, w_stride, k, yp + h * y_size, y_stride, 0, n)
    else:
        for h in prange(heads):
            _block(tag, xp + h * x_size, rows, wp + h * w_size, w_stride, k, yp + h * y_size, y_stride, 0, n)


def linear_heads(x: Array, w: Array, kind: int) -> Array:
    """x[h] @ w[h].T for every head h, in one launch; the same bits as `linear` head by head.

    x float32 [heads, tokens, k], C-contiguous; w [heads, n, k] as `kind` says; the result is float32
    [heads, tokens, n].

    Raises ValueError where the shapes do not fit together.
    """
    if x.shape[0] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not fit together")
    out = np.empty((x.shape[0], x.shape[1], w.shape[1]), np.float32)
    _linear_heads(TAGS[kind], x, w, out, thread_count() == 1)
    return out
