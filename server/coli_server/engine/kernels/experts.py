"""The feed-forward networks of a layer's chosen experts, straight from the slots of the expert cache."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numba import njit, prange

from coli_server.engine.kernels.formats import TAGS, Array, Tag, prepared_row_bytes, row_bytes
from coli_server.engine.kernels.linear import (
    SERIAL_WORK,
    four_rows,
    one_row,
    prepare_rows,
    prepared_scratch,
    rows_at_once,
    tiles_of_four,
)
from coli_server.engine.kernels.runtime import thread_count
from coli_server.engine.kernels.tiles import (
    CLAMPED_SWIGLU,
    GELU_TANH,
    SILU,
    STACK_8,
    STACK_16,
    STACK_768,
    TILE_1X8,
    address,
    get_float,
    prepare,
    prepared_bytes,
    put_address,
    put_float,
    task_rows,
)

ACTIVATION_SILU: Final = 0
ACTIVATION_CLAMPED_SWIGLU: Final = 1
ACTIVATION_GELU_TANH: Final = 2

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
    hidden: int = field(init=False, repr=False, compare=False)
    """Words of 4 bytes that a row of the scratch between the products takes."""
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
        object.__setattr__(self, "hidden", prepared_row_bytes(self.kind, self.f) // 4 or self.f)
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
    x: int,
    x_stride: int,
    pair_token: Array,
    begin: int,
    end: int,
    slot: int,
    layout: Array,
    scalars: Array,
    h: int,
    h_stride: int,
    row: int,
) -> None:
    """A task's elements, from `row` on, of h[begin:end] of one expert; prepared for down, if need be."""
    d, f = layout[0], layout[1]
    block, size = task_rows(tag), prepared_bytes(tag, row)
    xs, gs, us, ws = STACK_16(), STACK_16(), STACK_16(), STACK_8()
    gates, ups = STACK_768(), STACK_768()
    width = min(block, f - row)
    first = begin
    while first < end:
        pairs = rows_at_once(end - first)
        for p in range(pairs):
            put_address(xs, p, x + pair_token[first + p] * x_stride)
            put_address(gs, p, gates + 4 * block * p)
            put_address(us, p, ups + 4 * block * p)
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
            gate, up = gates + 4 * block * p, ups + 4 * block * p
            if layout[8] >= 0:
                _add_bias(slot + layout[8], layout[11], row, width, gate)
            if layout[9] >= 0:
                _add_bias(slot + layout[9], layout[12], row, width, up)
            out = h + (first + p) * h_stride
            if prepared_bytes(tag, f) > 0:
                _activate(layout[14], gate, up, gate, width, scalars)
                prepare(tag, gate, width, out + size)
            else:
                _activate(layout[14], gate, up, out + 4 * row, width, scalars)
        first += pairs


@njit(nogil=True, cache=True)
def _down(
    tag: Tag,
    h: int,
    h_stride: int,
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
    first = begin
    while first < end:
        pairs = rows_at_once(end - first)
        for p in range(pairs):
            put_address(xs, p, h + (first + p) * h_stride)
            put_address(ys, p, address(y) + pair_out[first + p] * y.strides[0])
        if pairs == 1:
            out = address(y) + pair_out[first] * y.strides[0]
            one_row(tag, h + first * h_stride, down, stride, f, out, row, stop, d)
        else:
            for n in range(row, stop, 4):
                four_rows(ws, down, stride, n, d)
                tiles_of_four(tag, xs, ws, ys, 4 * n, pairs, f, min(4, stop - n))
        if layout[10] >= 0:
            for p in range(pairs):
                out = address(y) + pair_out[first + p] * y.strides[0] + 4 * row
                _add_bias(slot + layout[10], layout[13], row, stop - row, out)
        first += pairs


@njit(nogil=True, cache=True, parallel=True)
def _experts(
    tag: Tag,
    x: Array,
    scratch: Array,
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
    d, f = layout[0], layout[1]
    xp, x_stride, hp, h_stride = address(x), x.strides[0], address(h), h.strides[0]
    if prepared_bytes(tag, d) > 0:
        prepare_rows(tag, xp, x.shape[0], d, address(scratch))
        xp, x_stride = address(scratch), prepared_bytes(tag, d)
    groups = slot_address.shape[0]
    pairs = group_start[groups] - group_start[0]
    block, width = task_rows(tag), _down_rows(d, f)
    up_blocks, down_blocks = (f + block - 1) // block, (d + width - 1) // width
    up_tasks, down_tasks = groups * up_blocks, groups * down_blocks
    if pairs * d * f * 3 < SERIAL_WORK:
        threads = 1
    # Groups differ in size, so every thread takes every so many-th block of each.
    if threads == 1:
        for task in range(up_tasks):
            g, row = task // up_blocks, task % up_blocks * block
            _gate_up(
                tag, xp, x_stride, pair_token, group_start[g], group_start[g + 1], slot_address[g], layout,
                scalars, hp, h_stride, row,
            )  # fmt: skip
        for task in range(down_tasks):
            g, row = task // down_blocks, task % down_blocks * width
            _down(
                tag, hp, h_stride, group_start[g], group_start[g + 1], slot_address[g], layout, y, pair_out,
                row, min(row + width, d),
            )  # fmt: skip
    else:
        for thread in prange(threads):
            for task in range(thread, up_tasks, threads):
                g, row = task // up_blocks, task % up_blocks * block
                _gate_up(
                    tag, xp, x_stride, pair_token, group_start[g], group_start[g + 1], slot_address[g],
                    layout, scalars, hp, h_stride, row,
                )  # fmt: skip
        for thread in prange(threads):
            for task in range(thread, down_tasks, threads):
                g, row = task // down_blocks, task % down_blocks * width
                _down(
                    tag, hp, h_stride, group_start[g], group_start[g + 1], slot_address[g], layout, y,
                    pair_out, row, min(row + width, d),
                )  # fmt: skip


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
    [groups]). h float32 [pairs or more, shape.hidden] is scratch; y float32 [rows, d]. All are C-contiguous,
    and all indices are trusted.

    Raises ValueError where the shapes do not fit together.
    """
    if (
        x.shape[1] != shape.d
        or y.shape[1] != shape.d
        or h.shape[1] != shape.hidden
        or len(h) < len(pair_token)
    ):
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
            prepared_scratch(shape.kind, *x.shape),
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
