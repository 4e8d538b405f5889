"""The feed-forward networks of a layer's chosen experts, straight from the slots of the expert cache."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.formats import TAGS, Array, Tag, row_bytes
from coli_server.engine.kernels.linear import ROWS_AT_ONCE, SERIAL_WORK, four_rows, one_row, tiles_of_four
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    CLAMPED_SWIGLU,
    GELU_TANH,
    SILU,
    STACK_8,
    STACK_16,
    STACK_96,
    TILE_1X8,
    address,
    get_float,
    put_address,
    put_float,
)

ACTIVATION_SILU: Final = 0
ACTIVATION_CLAMPED_SWIGLU: Final = 1
ACTIVATION_GELU_TANH: Final = 2

_BLOCK = 16
"""Rows of gate and of up that a task takes: as many as the activation has lanes."""

_DOWN_WORK = 16384
"""Weights of down that a task takes, about; at least 64 rows."""


@dataclass(frozen=True)
class ExpertShape:
    """Where an expert's matrices lie in its slot, and what happens between them.

    gate and up are [f, d], down is [d, f], all of one `kind`. Offsets are in bytes from the start of the
    slot, row strides in bytes (0 stands for rows without gaps), so gate and up may be interleaved. Biases are
    float32 in the slot: a byte offset (-1: none) and a stride in elements. Activations:

    * 0: silu(g) * u
    * 1: with g = min(g, limit) and u = clip(u, -limit, limit): (u + 1) * g * sigmoid(alpha * g)
    * 2: gelu(g) * u, the tanh form
    """

    kind: int
    d: int
    f: int
    gate_offset: int
    up_offset: int
    down_offset: int
    gate_stride: int = 0
    up_stride: int = 0
    down_stride: int = 0
    gate_bias: int = -1
    up_bias: int = -1
    down_bias: int = -1
    gate_bias_stride: int = 1
    up_bias_stride: int = 1
    down_bias_stride: int = 1
    activation: int = ACTIVATION_SILU
    alpha: float = 1.0
    limit: float = 0.0
    layout: Array = field(init=False, repr=False, compare=False)
    """int64 [16], what the kernel reads."""
    scalars: Array = field(init=False, repr=False, compare=False)
    """float32 [2]: alpha and limit."""

    def __post_init__(self) -> None:
        if self.kind not in TAGS or self.activation not in (0, 1, 2):
            raise ValueError(f"no kernel for weights of kind {self.kind} with activation {self.activation}")
        wide, narrow = row_bytes(self.kind, self.d), row_bytes(self.kind, self.f)
        layout = (
            self.d,
            self.f,
            self.gate_offset,
            self.up_offset,
            self.down_offset,
            self.gate_stride or wide,
            self.up_stride or wide,
            self.down_stride or narrow,
            self.gate_bias,
            self.up_bias,
            self.down_bias,
            self.gate_bias_stride,
            self.up_bias_stride,
            self.down_bias_stride,
            self.activation,
        )
        object.__setattr__(self, "layout", np.array(layout, np.int64))
        object.__setattr__(self, "scalars", np.array([self.alpha, self.limit], np.float32))


@njit(nogil=True, cache=True)
def _down_rows(d: int, f: int) -> int:
    """Rows of down that a task takes: shares that are equal, but for whole cache lines of results."""
    blocks = (d + max(64, _DOWN_WORK // f) - 1) // max(64, _DOWN_WORK // f)
    return ((d + blocks - 1) // blocks + 15) // 16 * 16


@njit(nogil=True, cache=True)
def _activate(activation: int, gate: int, up: int, out: int, n: int, scalars: Array) -> None:
    if activation == 0:
        SILU(gate, up, out, n, scalars[0], scalars[1])
    elif activation == 1:
        CLAMPED_SWIGLU(gate, up, out, n, scalars[0], scalars[1])
    else:
        GELU_TANH(gate, up, out, n, scalars[0], scalars[1])


@njit(nogil=True, cache=True)
def _add_bias(bias: int, stride: int, first: int, n: int, out: int) -> None:
    for i in range(n):
        put_float(out, i, get_float(out, i) + get_float(bias, (first + i) * stride))


@njit(nogil=True, cache=True)
def _gate_up(
    tag: Tag,
    x: Array,
    pair_token: Array,
    begin: int,
    end: int,
    slot: int,
    layout: Array,
    scalars: Array,
    h: Array,
    row: int,
) -> None:
    """h[begin:end, row:row + 16] of one expert."""
    d, f = layout[0], layout[1]
    xs, gs, us, ws = STACK_16(), STACK_16(), STACK_16(), STACK_8()
    gates, ups = STACK_96(), STACK_96()
    width = min(_BLOCK, f - row)
    for first in range(begin, end, ROWS_AT_ONCE):
        pairs = min(ROWS_AT_ONCE, end - first)
        for p in range(pairs):
            put_address(xs, p, address(x) + pair_token[first + p] * x.strides[0])
            put_address(gs, p, gates + 64 * p)
            put_address(us, p, ups + 64 * p)
        if pairs == 1:
            put_address(gs, 1, ups)
        for n in range(0, width, 4):
            four_rows(ws, slot + layout[2], layout[5], row + n, f)
            four_rows(ws + 32, slot + layout[3], layout[6], row + n, f)
            if pairs == 1:
                TILE_1X8(tag, xs, ws, gs, 4 * n, d, 4)
            else:
                tiles_of_four(tag, xs, ws, gs, 4 * n, pairs, d, np.int64(4))
                tiles_of_four(tag, xs, ws + 32, us, 4 * n, pairs, d, np.int64(4))
        for p in range(pairs):
            if layout[8] >= 0:
                _add_bias(slot + layout[8], layout[11], row, width, gates + 64 * p)
            if layout[9] >= 0:
                _add_bias(slot + layout[9], layout[12], row, width, ups + 64 * p)
            out = address(h) + (first + p) * h.strides[0] + 4 * row
            _activate(layout[14], gates + 64 * p, ups + 64 * p, out, width, scalars)


@njit(nogil=True, cache=True)
def _down(
    tag: Tag,
    h: Array,
    begin: int,
    end: int,
    slot: int,
    layout: Array,
    y: Array,
    pair_out: Array,
    row: int,
    stop: int,
) -> None:
    """y[pair_out[begin:end], row:stop] of one expert."""
    d, f = layout[0], layout[1]
    down, stride = slot + layout[4], layout[7]
    xs, ys, ws = STACK_16(), STACK_16(), STACK_8()
    for first in range(begin, end, ROWS_AT_ONCE):
        pairs = min(ROWS_AT_ONCE, end - first)
        for p in range(pairs):
            put_address(xs, p, address(h) + (first + p) * h.strides[0])
            put_address(ys, p, address(y) + pair_out[first + p] * y.strides[0])
        if pairs == 1:
            out = address(y) + pair_out[first] * y.strides[0]
            one_row(tag, address(h) + first * h.strides[0], down, stride, f, out, row, stop, d)
        else:
            for n in range(row, stop, 4):
                four_rows(ws, down, stride, n, d)
                tiles_of_four(tag, xs, ws, ys, 4 * n, pairs, f, min(4, stop - n))
        if layout[10] >= 0:
            for p in range(pairs):
                out = address(y) + pair_out[first + p] * y.strides[0] + 4 * row
                _add_bias(slot + layout[10], layout[13], row, stop - row, out)


@njit(nogil=True, cache=True, inline="always")
def _gate_up_task(
    task: int,
    blocks: int,
    tag: Tag,
    x: Array,
    pair_token: Array,
    group_start: Array,
    slot_address: Array,
    layout: Array,
    scalars: Array,
    h: Array,
) -> None:
    g, row = task // blocks, task % blocks * _BLOCK
    begin, end = group_start[g], group_start[g + 1]
    _gate_up(tag, x, pair_token, begin, end, slot_address[g], layout, scalars, h, row)


@njit(nogil=True, cache=True, inline="always")
def _down_task(
    task: int,
    blocks: int,
    width: int,
    tag: Tag,
    h: Array,
    group_start: Array,
    slot_address: Array,
    layout: Array,
    y: Array,
    pair_out: Array,
) -> None:
    g, row = task // blocks, task % blocks * width
    stop = min(row + width, layout[0])
    _down(tag, h, group_start[g], group_start[g + 1], slot_address[g], layout, y, pair_out, row, stop)


@njit(nogil=True, cache=True, parallel=True)
def _experts(
    tag: Tag,
    x: Array,
    pair_token: Array,
    group_start: Array,
    slot_address: Array,
    layout: Array,
    scalars: Array,
    h: Array,
    y: Array,
    pair_out: Array,
    threads: int,
) -> None:
    groups = slot_address.shape[0]
    pairs = group_start[groups] - group_start[0]
    up_blocks = (layout[1] + _BLOCK - 1) // _BLOCK
    width = _down_rows(layout[0], layout[1])
    down_blocks = (layout[0] + width - 1) // width
    up_tasks, down_tasks = groups * up_blocks, groups * down_blocks
    if threads == 1 or pairs * layout[0] * layout[1] * 3 < SERIAL_WORK:
        for task in range(up_tasks):
            _gate_up_task(task, up_blocks, tag, x, pair_token, group_start, slot_address, layout, scalars, h)
        for task in range(down_tasks):
            _down_task(task, down_blocks, width, tag, h, group_start, slot_address, layout, y, pair_out)
    else:
        # Groups differ in size, so every thread takes every so many-th block of each.
        for thread in prange(threads):
            for task in range(thread, up_tasks, threads):
                _gate_up_task(
                    task, up_blocks, tag, x, pair_token, group_start, slot_address, layout, scalars, h
                )
        for thread in prange(threads):
            for task in range(thread, down_tasks, threads):
                _down_task(task, down_blocks, width, tag, h, group_start, slot_address, layout, y, pair_out)


def experts_ffn(
    x: Array,
    pair_token: Array,
    group_start: Array,
    slot_address: Array,
    shape: ExpertShape,
    h: Array,
    y: Array,
    pair_out: Array,
) -> Array:
    """y[pair_out[p]] = expert(x[pair_token[p]]) for every pair p, not weighted, in two launches; gives y.

    x float32 [tokens, d]; pair_token and pair_out int32 [pairs]; group_start int32 [groups + 1]: pairs
    group_start[g]..group_start[g + 1] - 1 belong to the expert whose bytes begin at slot_address[g] (int64
    [groups]). h float32 [pairs or more, f] is scratch; y float32 [rows, d]. All are C-contiguous, and all
    indices are trusted.

    Raises ValueError where the shapes do not fit together.
    """
    if x.shape[1] != shape.d or y.shape[1] != shape.d or h.shape[1] != shape.f or len(h) < len(pair_token):
        raise ValueError(
            f"x {x.shape}, h {h.shape} and y {y.shape} do not fit experts of {shape.d} x {shape.f}"
        )
    if len(group_start) != len(slot_address) + 1 or len(pair_out) != len(pair_token):
        raise ValueError(
            f"{len(slot_address)} groups but {len(group_start)} starts, "
            f"or {len(pair_token)} pairs but {len(pair_out)} outputs"
        )
    if len(slot_address):
        _experts(
            TAGS[shape.kind],
            x,
            pair_token,
            group_start,
            slot_address,
            shape.layout,
            shape.scalars,
            h,
            y,
            pair_out,
            thread_count(),
        )
    return y
