"""Attention of one sequence over its KV cache, by a running softmax over blocks of 16 positions."""

from typing import Any

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.linear import SERIAL_WORK, tiles_of_four
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    STACK_16,
    STACK_128,
    get_float,
    put_address,
    put_float,
    softmax_step,
    weighted_rows,
)

Array = np.ndarray[Any, Any]

HEADS_AT_ONCE = 16
"""Query heads of one KV head that a task may take together: as many as its tables on the stack hold."""

_NO_SINKS: Array = np.zeros(0, np.float32)
_ALL_POSITIONS: Array = np.zeros((0, 0), np.int32)


@njit(nogil=True, cache=True)
def _heads_per_task(tasks, group, threads):  # type: ignore[no-untyped-def]
    """The most heads a task may share keys among that still keep all threads equally busy.

    `tasks` is the number of tasks if each takes all `group` heads of a KV head.
    """
    for heads in range(min(group, HEADS_AT_ONCE), 1, -1):
        count = tasks * (group // heads)
        if group % heads == 0 and count >= threads and (count >= 8 * threads or count % threads == 0):
            return heads
    return 1


@njit(nogil=True, cache=True)
def _start(state, sinks, first_head, heads, out, width):  # type: ignore[no-untyped-def]
    """Running maximum and denominator of every head (a sink is a first logit without a value), and zeros."""
    for h in range(heads):
        if sinks.shape[0] > 0:
            put_float(state, 2 * h, sinks[first_head + h])
            put_float(state, 2 * h + 1, np.float32(1))
        else:
            put_float(state, 2 * h, np.float32(-np.inf))
            put_float(state, 2 * h + 1, np.float32(0))
    for i in range(heads * width):
        put_float(out, i, np.float32(0))


@njit(nogil=True, cache=True)
def _finish(state, heads, out, width):  # type: ignore[no-untyped-def]
    for h in range(heads):
        denominator = get_float(state, 2 * h + 1)
        if denominator > 0:  # zero where no position is allowed: the row stays zero
            for d in range(h * width, (h + 1) * width):
                put_float(out, d, get_float(out, d) / denominator)


@njit(nogil=True, cache=True)
def _attend(  # type: ignore[no-untyped-def]
    q,
    dk,
    keys,
    key_stride,
    values,
    value_stride,
    first_head,
    heads,
    first,
    last,
    allowed,
    row,
    sinks,
    scale,
    out,
    dv,
):
    """One row, `heads` query heads of one KV head; q, keys, values, out are addresses of their first row."""
    qs, ys, scores, state = STACK_16(), STACK_16(), STACK_128(), STACK_16()
    key_rows, value_rows = STACK_16(), STACK_16()
    for h in range(heads):
        put_address(qs, h, q + h * dk * 4)
    _start(state, sinks, first_head, heads, out, dv)
    listed = allowed.shape[1]
    cursor, stop = (np.int64(0), np.int64(listed)) if listed > 0 else (first, last + 1)
    while cursor < stop:
        count = 0
        while count < 16 and cursor < stop:
            position = np.int64(allowed[row, cursor]) if listed > 0 else cursor
            cursor += 1
            if first <= position <= last:
                put_address(key_rows, count, keys + position * key_stride)
                put_address(value_rows, count, values + position * value_stride)
                count += 1
        if count == 0:
            break
        for i in range(count, (count + 3) // 4 * 4):
            put_address(key_rows, i, keys + last * key_stride)
        for j in range(0, count, 4):
            for h in range(heads):
                put_address(ys, h, scores + 64 * h + 4 * j)
            tiles_of_four(np.float32(0), qs, key_rows + 8 * j, ys, heads, dk, 4)
        for h in range(heads):
            factor = softmax_step(scores + 64 * h, count, scale, state + 8 * h)
            weighted_rows(scores + 64 * h, value_rows, count, dv, out + h * dv * 4, factor)
    _finish(state, heads, out, dv)


@njit(nogil=True, cache=True)
def _task(  # type: ignore[no-untyped-def]
    task, heads, q, positions, keys, values, window, sinks, allowed, scale, out
):
    """Task number `task`: row by row, and in a row `heads` query heads at a time."""
    q_heads, dk, dv = q.shape[1], q.shape[2], values.shape[2]
    units = q_heads // heads
    row, head = task // units, task % units * heads
    kv_head = head // (q_heads // keys.shape[1])
    last = np.int64(positions[row])
    first = max(np.int64(0), last - window + 1) if window > 0 else np.int64(0)
    _attend(
        q.ctypes.data + (row * q_heads + head) * dk * 4,
        dk,
        keys.ctypes.data + kv_head * keys.strides[1],
        keys.strides[0],
        values.ctypes.data + kv_head * values.strides[1],
        values.strides[0],
        head,
        heads,
        first,
        last,
        allowed,
        row,
        sinks,
        scale,
        out.ctypes.data + (row * q_heads + head) * dv * 4,
        dv,
    )


@njit(nogil=True, cache=True, parallel=True)
def _attention(q, positions, keys, values, window, sinks, allowed, scale, out, threads):  # type: ignore[no-untyped-def]
    rows, q_heads, dk = q.shape
    group = q_heads // keys.shape[1]
    heads = _heads_per_task(rows * keys.shape[1], group, threads)
    tasks = rows * (q_heads // heads)
    seen = allowed.shape[1] if allowed.shape[1] > 0 else np.int64(positions[rows - 1]) + 1
    if window > 0:
        seen = min(seen, window)
    if threads == 1 or rows * q_heads * seen * (dk + values.shape[2]) < SERIAL_WORK:
        for task in range(tasks):
            _task(task, heads, q, positions, keys, values, window, sinks, allowed, scale, out)
    else:
        # Late rows see more than early ones, so every thread takes every so many-th task.
        for thread in prange(threads):
            for task in range(thread, tasks, threads):
                _task(task, heads, q, positions, keys, values, window, sinks, allowed, scale, out)


def attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    scale: float,
    *,
    window: int = 0,
    sinks: Array | None = None,
    allowed: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Causal attention of rows of one sequence: softmax(scale * q @ keys.T) @ values, for every query head.

    q float32 [tokens, q_heads, dk]; keys float32 [capacity, kv_heads, dk] and values float32 [capacity,
    kv_heads, dv], contiguous in the last dimension (values may be a view of keys); positions int32 [tokens],
    the absolute position of every row. Row t sees positions 0..positions[t], with `window` > 0 only the last
    so many of them, with `allowed` int32 [tokens, n] only those listed there (-1 pads). sinks float32 [q_heads]
    are one more logit each in the softmax's denominator. out float32 [tokens, q_heads, dv], C-contiguous, made
    if None.

    Raises ValueError where the shapes do not fit together.
    """
    tokens, q_heads, dk = q.shape
    if out is None:
        out = np.empty((tokens, q_heads, values.shape[2]), np.float32)
    if keys.shape[2] != dk or q_heads % keys.shape[1] or values.shape[:2] != keys.shape[:2]:
        raise ValueError(f"q {q.shape}, keys {keys.shape} and values {values.shape} do not fit together")
    if positions.shape[0] != tokens or out.shape != (tokens, q_heads, values.shape[2]):
        raise ValueError(f"positions {positions.shape} or out {out.shape} do not fit q {q.shape}")
    sinks = _NO_SINKS if sinks is None else sinks
    allowed = _ALL_POSITIONS if allowed is None else allowed
    if tokens:
        _attention(q, positions, keys, values, window, sinks, allowed, np.float32(scale), out, thread_count())
    return out
