"""Attention of sequences over their KV caches, by a running softmax over blocks of 64 positions.

A task takes a few rows and a few query heads that share a KV head, so that keys are loaded once for all of
them. Blocks begin at multiples of 64 wherever a row's first position is: its task does not change its result.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.formats import Array
from coli_server.engine.kernels.linear import SERIAL_WORK, tiles_of_four
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    STACK_16,
    STACK_64,
    STACK_384,
    WEIGHTED_1,
    WEIGHTED_2,
    WEIGHTED_3,
    WEIGHTED_4,
    address,
    get_float,
    put_address,
    put_float,
    softmax_step,
)

_QUERIES = 12
"""Pairs of row and head in a task, at most: two tall tiles."""

_BLOCK = 64
"""Positions between two updates of the running softmax."""

_NO_SINKS: Array = np.zeros(0, np.float32)
_ALL_POSITIONS: Array = np.zeros((0, 0), np.int32)


@njit(nogil=True, cache=True)
def _heads_per_task(tasks: int, group: int, threads: int) -> int:
    """The most heads a task may share keys among that still keep all threads equally busy.

    `tasks` is the number of tasks if each takes all `group` heads of a KV head.
    """
    for heads in range(min(group, _QUERIES), 1, -1):
        count = tasks * (group // heads)
        if group % heads == 0 and count >= threads and (count >= 8 * threads or count % threads == 0):
            return heads
    return 1


@njit(nogil=True, cache=True)
def _start(state: int, sinks: Array, head: int, heads: int, out: int, dv: int) -> None:
    """Running maximum and denominator of every head (a sink is a first logit without a value), and zeros."""
    for h in range(heads):
        sunk = sinks.shape[0] > 0
        put_float(state, 4 * h, sinks[head + h] if sunk else np.float32(-np.inf))
        put_float(state, 4 * h + 1, np.float32(1) if sunk else np.float32(0))
    for i in range(heads * dv):
        put_float(out, i, np.float32(0))


@njit(nogil=True, cache=True)
def _fold(
    scores: int, state: int, values: int, first: int, stop: int, scale: float, heads: int, out: int, dv: int
) -> None:
    """Add positions first..stop - 1 of a block to `heads` heads of a row."""
    for h in range(heads):
        softmax_step(scores + 4 * _BLOCK * h, first, stop, scale, state + 16 * h)
    p_stride, o_stride = 4 * _BLOCK, 4 * dv
    h = 0
    while h + 4 <= heads:
        p, s, o = scores + p_stride * h, state + 16 * h, out + o_stride * h
        WEIGHTED_4(p, p_stride, s, values, first, stop, dv, o, o_stride)
        h += 4
    p, s, o = scores + p_stride * h, state + 16 * h, out + o_stride * h
    if heads - h == 3:
        WEIGHTED_3(p, p_stride, s, values, first, stop, dv, o, o_stride)
    elif heads - h == 2:
        WEIGHTED_2(p, p_stride, s, values, first, stop, dv, o, o_stride)
    elif heads - h == 1:
        WEIGHTED_1(p, p_stride, s, values, first, stop, dv, o, o_stride)


@njit(nogil=True, cache=True)
def _finish(state: int, heads: int, out: int, dv: int) -> None:
    for h in range(heads):
        denominator = get_float(state, 4 * h + 1)
        if denominator > 0:  # zero where no position is allowed: the row stays zero
            for d in range(h * dv, (h + 1) * dv):
                put_float(out, d, get_float(out, d) / denominator)


@njit(nogil=True, cache=True)
def _score(queries: int, count: int, dk: int, keys: int, first: int, stop: int, targets: int) -> None:
    """Scores of positions first..stop - 1 of a block, in fours, for `count` queries."""
    for j in range(first // 4 * 4, stop, 4):
        tiles_of_four(np.float32(0), queries, keys + 8 * j, targets, 4 * j, count, dk, np.int64(4))


@njit(nogil=True, cache=True)
def _first_seen(last: Any, window: int) -> Any:
    return max(0, last - window + 1) if window > 0 else 0


@njit(nogil=True, cache=True)
def _rows(
    q: Array,
    cache: Array,
    bases: Array,
    positions: Array,
    scale: float,
    window: int,
    sinks: Array,
    out: Array,
    row: int,
    rows: int,
    head: int,
    heads: int,
) -> None:
    """Rows row..row + rows - 1, heads head..head + heads - 1, all of one KV head, over all that they see."""
    q_heads, dk, dv = q.shape[1], q.shape[2], out.shape[2]
    kv_head = head // (q_heads // cache[0])
    keys, values = bases[row, 0] + kv_head * cache[2], bases[row, 1] + kv_head * cache[4]
    qs, ys, scores, states = STACK_16(), STACK_16(), STACK_384(), STACK_64()
    key_rows, value_rows = STACK_64(), STACK_64()
    first: Any = np.int64(positions[row])
    last: Any = np.int64(0)
    for r in range(rows):
        at = (row + r) * q_heads + head
        for h in range(heads):
            put_address(qs, r * heads + h, address(q) + (at + h) * dk * 4)
            put_address(ys, r * heads + h, scores + 4 * _BLOCK * (r * heads + h))
        _start(states + 16 * r * heads, sinks, head, heads, address(out) + at * dv * 4, dv)
        last = max(last, np.int64(positions[row + r]))
        first = min(first, _first_seen(np.int64(positions[row + r]), window))
    for block in range(first // _BLOCK * _BLOCK, last + 1, _BLOCK):
        stop = min(_BLOCK, last + 1 - block)
        for j in range((stop + 3) // 4 * 4):
            position = block + min(j, stop - 1)
            put_address(key_rows, j, keys + position * cache[1])
            put_address(value_rows, j, values + position * cache[3])
        _score(qs, rows * heads, dk, key_rows, max(0, first - block), stop, ys)
        for r in range(rows):
            seen = np.int64(positions[row + r])
            begin, end = max(0, _first_seen(seen, window) - block), min(_BLOCK, seen + 1 - block)
            if begin < end:
                place = address(out) + ((row + r) * q_heads + head) * dv * 4
                i = r * heads
                _fold(
                    scores + 4 * _BLOCK * i, states + 16 * i, value_rows, begin, end, scale, heads, place, dv
                )
    for r in range(rows):
        place = address(out) + ((row + r) * q_heads + head) * dv * 4
        _finish(states + 16 * r * heads, heads, place, dv)


@njit(nogil=True, cache=True)
def _chosen(
    q: Array,
    cache: Array,
    bases: Array,
    positions: Array,
    scale: float,
    window: int,
    sinks: Array,
    allowed: Array,
    out: Array,
    row: int,
    head: int,
    heads: int,
) -> None:
    """One row, heads head..head + heads - 1, all of one KV head, over the listed positions that it sees."""
    q_heads, dk, dv = q.shape[1], q.shape[2], out.shape[2]
    kv_head = head // (q_heads // cache[0])
    keys, values = bases[row, 0] + kv_head * cache[2], bases[row, 1] + kv_head * cache[4]
    qs, ys, scores, states = STACK_16(), STACK_16(), STACK_384(), STACK_64()
    key_rows, value_rows = STACK_64(), STACK_64()
    last = np.int64(positions[row])
    first = _first_seen(last, window)
    for h in range(heads):
        put_address(qs, h, address(q) + (row * q_heads + head + h) * dk * 4)
        put_address(ys, h, scores + 4 * _BLOCK * h)
    place = address(out) + (row * q_heads + head) * dv * 4
    _start(states, sinks, head, heads, place, dv)
    cursor = 0
    while cursor < allowed.shape[1]:
        count = 0
        while count < _BLOCK and cursor < allowed.shape[1]:
            position = np.int64(allowed[row, cursor])
            cursor += 1
            if first <= position <= last:
                put_address(key_rows, count, keys + position * cache[1])
                put_address(value_rows, count, values + position * cache[3])
                count += 1
        for j in range(count, (count + 3) // 4 * 4):
            put_address(key_rows, j, keys + last * cache[1])
        if count > 0:
            _score(qs, heads, dk, key_rows, np.int64(0), count, ys)
            _fold(scores, states, value_rows, np.int64(0), count, scale, heads, place, dv)
    _finish(states, heads, place, dv)


@njit(nogil=True, cache=True, inline="always")
def _task(
    q: Array,
    cache: Array,
    bases: Array,
    positions: Array,
    scale: float,
    window: int,
    sinks: Array,
    allowed: Array,
    out: Array,
    task: int,
    rows: int,
    heads: int,
) -> None:
    """Task number `task`, of at most `rows` rows and `heads` heads."""
    units = q.shape[1] // heads
    row, head = task // units * rows, task % units * heads
    if allowed.shape[1] > 0:
        _chosen(q, cache, bases, positions, scale, window, sinks, allowed, out, row, head, heads)
    else:
        count = min(rows, q.shape[0] - row)
        _rows(q, cache, bases, positions, scale, window, sinks, out, row, count, head, heads)


@njit(nogil=True, cache=True, parallel=True)
def _attention(
    q: Array,
    cache: Array,
    bases: Array,
    positions: Array,
    scale: float,
    window: int,
    sinks: Array,
    allowed: Array,
    out: Array,
    together: bool,
    threads: int,
) -> None:
    tokens, q_heads, dk = q.shape
    kv_heads, listed = cache[0], allowed.shape[1]
    heads = _heads_per_task(tokens * kv_heads, q_heads // kv_heads, threads)
    units = q_heads // heads
    rows: Any = np.int64(1)
    if together and listed == 0:
        rows = max(1, min(_QUERIES // heads, tokens * units // (4 * threads)))
    tasks = (tokens + rows - 1) // rows * units
    seen = listed if listed > 0 else np.int64(positions.max()) + 1
    if window > 0:
        seen = min(seen, window)
    if threads == 1 or tokens * q_heads * seen * (dk + out.shape[2]) < SERIAL_WORK:
        for task in range(tasks):
            _task(q, cache, bases, positions, scale, window, sinks, allowed, out, task, rows, heads)
    else:
        # Late rows see more than early ones, so every thread takes every so many-th task.
        for thread in prange(threads):
            for task in range(thread, tasks, threads):
                _task(q, cache, bases, positions, scale, window, sinks, allowed, out, task, rows, heads)


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

    q float32 [tokens, q_heads, dk], C-contiguous; keys float32 [capacity, kv_heads, dk] and values float32
    [capacity, kv_heads, dv], contiguous in the last dimension (values may be a view of keys); positions int32
    [tokens], the absolute position of every row, ascending. Row t sees positions 0..positions[t], with
    `window` > 0 only the last so many of them, with `allowed` int32 [tokens, n] only those listed there (-1
    pads). sinks float32 [q_heads] are one more logit each in the softmax's denominator. out float32 [tokens,
    q_heads, dv], C-contiguous, made if None.

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
        bases = np.empty((tokens, 2), np.int64)
        bases[:] = keys.ctypes.data, values.ctypes.data
        cache = kv_layout(keys, values)
        _attention(
            q, cache, bases, positions, np.float32(scale), window, sinks, allowed, out, True, thread_count()
        )
    return out


def kv_layout(keys: Array, values: Array) -> Array:
    """How a layer's caches lie in memory: int64 [5], KV heads, and the byte strides of a position and of a
    head among the keys and among the values."""
    return np.array([keys.shape[1], *keys.strides[:2], *values.strides[:2]], np.int64)


def attend(
    cache: Array,
    q: Array,
    bases: Array,
    positions: Array,
    out: Array,
    scale: float,
    window: int,
    sinks: Array | None,
    together: bool,
) -> None:
    """`attention` of rows of several sequences in one launch; nothing is checked.

    `cache` is the `kv_layout` of all of them; `bases` int64 [tokens, 2]: where keys and values of each row's
    sequence begin. `together`: all rows are of one sequence, ascending, and may share the keys they load.
    """
    _attention(
        q, cache, bases, positions, np.float32(scale), window, _NO_SINKS if sinks is None else sinks,
        _ALL_POSITIONS, out, together, thread_count(),
    )  # fmt: skip
