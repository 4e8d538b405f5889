"""Products of activations with weight matrices stored as the checkpoint has them."""

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.formats import TAGS, Array, Tag, prepared_row_bytes, row_bytes
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    STACK_8,
    STACK_16,
    TILE_1X4,
    TILE_1X8,
    TILE_2X4,
    TILE_3X4,
    TILE_4X4,
    TILE_5X4,
    TILE_6X4,
    address,
    prepare,
    prepared_bytes,
    put_address,
)

ROWS_AT_ONCE = 12
"""Rows of x that meet a panel of weights together: two tall tiles, few enough to stay in the first cache."""

_PANEL = 64
"""Weight rows that meet all rows of x, 12 at a time, before the next: they stay in the second cache."""

SERIAL_WORK = 150_000
"""Multiplications below which starting the second thread costs more than it saves."""

NO_BIAS: Array = np.zeros(0, np.float32)


@njit(nogil=True, cache=True)
def four_rows(table: int, base: int, stride: int, row: int, rows: int) -> None:
    """Put the addresses of rows row..row + 3 of `rows` into a table (past the end that of the last)."""
    for j in range(4):
        put_address(table, j, base + min(row + j, rows - 1) * stride)


@njit(nogil=True, cache=True)
def tiles_of_four(tag: Tag, xs: int, ws: int, ys: int, shift: int, rows: int, k: int, valid: int) -> None:
    """Products of `rows` rows with four weight rows, by tiles of nearly the same height, six at most
    (arguments as theirs): low ones wait for memory and for their own sums."""
    i = 0
    while i < rows:
        left = rows - i
        tiles = (left + 5) // 6
        height = (left + tiles - 1) // tiles
        if height == 6:
            TILE_6X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        elif height == 5:
            TILE_5X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        elif height == 4:
            TILE_4X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        elif height == 3:
            TILE_3X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        elif height == 2:
            TILE_2X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        else:
            TILE_1X4(tag, xs + 8 * i, ws, ys + 8 * i, shift, k, valid)
        i += height


@njit(nogil=True, cache=True)
def rows_at_once(left: int) -> int:
    """How many of `left` rows meet a panel of weights next: as many as those behind them, about."""
    turns = (left + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    return (left + turns - 1) // turns


@njit(nogil=True, cache=True)
def one_row(tag: Tag, x: int, w: int, stride: int, k: int, y: int, start: int, stop: int, rows: int) -> None:
    """y[start:stop], all addresses, for one row of x and a matrix of `rows` rows.

    Eight weight rows at a time keep the memory busy.
    """
    xs, ws, ys = STACK_8(), STACK_8(), STACK_8()
    put_address(xs, 0, x)
    put_address(ys, 0, y)
    put_address(ys, 1, y + 16)
    n = start
    while n + 8 <= stop:
        four_rows(ws, w, stride, n, rows)
        four_rows(ws + 32, w, stride, n + 4, rows)
        TILE_1X8(tag, xs, ws, ys, 4 * n, k, 4)
        n += 8
    while n < stop:
        four_rows(ws, w, stride, n, rows)
        TILE_1X4(tag, xs, ws, ys, 4 * n, k, min(4, stop - n))
        n += 4


@njit(nogil=True, cache=True)
def prepare_rows(tag: Tag, x: int, rows: int, k: int, out: int) -> None:
    """Prepare rows of float32 that follow each other; all addresses."""
    size = prepared_bytes(tag, k)
    for row in range(rows):
        prepare(tag, x + row * k * 4, k, out + row * size)


@njit(nogil=True, cache=True)
def _block(
    tag: Tag,
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    k: int,
    y: int,
    y_stride: int,
    start: int,
    stop: int,
) -> None:
    """y[:rows, start:stop], all addresses."""
    if rows == 1:
        one_row(tag, x, w, w_stride, k, y, start, stop, stop)
        return
    xs, ws, ys = STACK_16(), STACK_8(), STACK_16()
    for panel in range(start, stop, _PANEL):
        first = 0
        while first < rows:
            count = rows_at_once(rows - first)
            for i in range(count):
                put_address(xs, i, x + (first + i) * x_stride)
                put_address(ys, i, y + (first + i) * y_stride)
            for n in range(panel, min(stop, panel + _PANEL), 4):
                four_rows(ws, w, w_stride, n, stop)
                tiles_of_four(tag, xs, ws, ys, 4 * n, count, k, min(4, stop - n))
            first += count


@njit(nogil=True, cache=True)
def _add_bias(out: Array, bias: Array) -> None:
    for t in range(out.shape[0]):
        for n in range(out.shape[1]):
            out[t, n] += bias[n]


@njit(nogil=True, cache=True, parallel=True)
def _linear(tag: Tag, x: Array, w: Array, bias: Array, out: Array, scratch: Array, threads: int) -> None:
    rows, k = x.shape
    n = w.shape[0]
    xp, wp, yp = address(x), address(w), address(out)
    x_stride, w_stride, y_stride = k * 4, w.strides[0], out.strides[0]
    if prepared_bytes(tag, k) > 0:
        prepare_rows(tag, xp, rows, k, address(scratch))
        xp, x_stride = address(scratch), prepared_bytes(tag, k)
    if threads == 1 or rows * n * k < SERIAL_WORK:
        _block(tag, xp, x_stride, rows, wp, w_stride, k, yp, y_stride, np.int64(0), n)
    else:
        width = (n + threads * 8 - 1) // (threads * 8) * 8
        for thread in prange(threads):
            start, stop = thread * width, min(n, (thread + 1) * width)
            if start < stop:
                _block(tag, xp, x_stride, rows, wp, w_stride, k, yp, y_stride, start, stop)
    if bias.shape[0] > 0:
        _add_bias(out, bias)


_NOTHING: Array = np.zeros(64, np.uint8)


def prepared_scratch(kind: int, rows: int, k: int) -> Array:
    """Room for `rows` prepared rows, uint8, at a multiple of 64 bytes."""
    size = rows * prepared_row_bytes(kind, k)
    if not size:
        return _NOTHING
    room = np.empty(size + 64, np.uint8)
    return room[-room.ctypes.data % 64 :]


def linear(x: Array, w: Array, kind: int, bias: Array | None = None, out: Array | None = None) -> Array:
    """x @ w.T + bias.

    x float32 [tokens, k], C-contiguous; w [n, k] as `kind` says (quantised rows: uint8 [n, row_bytes]), its
    rows at any stride; bias float32 [n] or
    None; out float32 [tokens, n], C-contiguous, made if None. An element depends only on its rows of x and w.

    Raises ValueError where the shapes do not fit together.
    """
    if out is None:
        out = np.empty((x.shape[0], w.shape[0]), np.float32)
    if row_bytes(kind, x.shape[1]) != w.shape[1] * w.itemsize or out.shape != (x.shape[0], w.shape[0]):
        raise ValueError(f"x {x.shape}, w {w.shape} and out {out.shape} do not fit together")
    scratch = prepared_scratch(kind, *x.shape)
    _linear(TAGS[kind], x, w, NO_BIAS if bias is None else bias, out, scratch, thread_count())
    return out


@njit(nogil=True, cache=True, parallel=True)
def _linear_heads(tag: Tag, x: Array, w: Array, out: Array, scratch: Array, threads: int) -> None:
    heads, rows, k = x.shape
    n = w.shape[1]
    xp, wp, yp = address(x), address(w), address(out)
    x_stride, w_size, y_size = k * 4, w.strides[0], out.strides[0]
    if prepared_bytes(tag, k) > 0:
        prepare_rows(tag, xp, heads * rows, k, address(scratch))
        xp, x_stride = address(scratch), prepared_bytes(tag, k)
    x_size = rows * x_stride
    w_stride, y_stride, start = w.strides[1], out.strides[1], np.int64(0)
    if threads == 1 or heads * rows * n * k < SERIAL_WORK:
        for h in range(heads):
            to = yp + h * y_size
            _block(tag, xp + h * x_size, x_stride, rows, wp + h * w_size, w_stride, k, to, y_stride, start, n)
    else:
        for h in prange(heads):
            to = yp + h * y_size
            _block(tag, xp + h * x_size, x_stride, rows, wp + h * w_size, w_stride, k, to, y_stride, start, n)


def linear_heads(x: Array, w: Array, kind: int) -> Array:
    """x[h] @ w[h].T for every head h, in one launch; the same bits as `linear` head by head.

    x float32 [heads, tokens, k], C-contiguous; w [heads, n, k] as `kind` says; the result is float32
    [heads, tokens, n].

    Raises ValueError where the shapes do not fit together.
    """
    if x.shape[0] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not fit together")
    out = np.empty((x.shape[0], x.shape[1], w.shape[1]), np.float32)
    heads, rows, k = x.shape
    _linear_heads(TAGS[kind], x, w, out, prepared_scratch(kind, heads * rows, k), thread_count())
    return out
