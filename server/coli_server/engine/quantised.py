"""Packing rows of weights into the quantised forms that kernels read, and back (see kernels/formats.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coli_server.engine.kernels.formats import Kind, code_bytes, row_bytes

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_CLIPS = 8
"""Clip ratios that are tried for a group of 4-bit weights."""

_LEAST_CODE = np.float32(6.5)
"""What a group's largest weight is in codes at the first of them; half a code more at each next."""

_TINY = np.float32(1e-30)
"""Scales below have no finite reciprocal, or nearly none: such weights count as zeros."""


def quantise(weights: F32, kind: Kind) -> U8:
    """Rows of `kind`, uint8 [n, row_bytes], of float32 [n, k].

    8 bits: the largest weight of a group gets the largest code. 4 bits: the scale with the least square
    error, over both signs (codes reach from -8 to 7) and several clip ratios, each refined by least squares.
    A scale is rounded to bfloat16 before codes are chosen. Raises ValueError for a weight that is not finite.
    """
    if not np.isfinite(weights).all():
        raise ValueError("a weight is not a finite number")
    n, k = weights.shape
    group = kind.group
    groups = -(-k // group)
    padded = np.zeros((n, groups * group), np.float32)
    padded[:, :k] = weights
    scales = np.empty((n, groups), np.float32)
    codes = np.empty(padded.shape, np.int8)
    if kind.bits == 8:
        _eight(padded.reshape(n, groups, group), scales, codes.reshape(n, groups, group))
    else:
        _four(padded.reshape(n, groups, group), scales, codes.reshape(n, groups, group))
    return pack(codes[:, :k], scales, kind)


def pack(codes: NDArray[np.int8], scales: F32, kind: Kind) -> U8:
    """Rows of `kind` of signed codes int8 [n, k] and scales float32 [n, groups], bfloat16 numbers."""
    n, k = codes.shape
    size = code_bytes(kind, k)
    rows = np.zeros((n, row_bytes(kind, k)), np.uint8)
    if kind.bits == 8:
        rows[:, :k] = codes.view(np.uint8)
    else:
        wide = np.full((n, 2 * size), 8, np.uint8)
        wide[:, :k] = codes + np.int8(8)
        blocks = wide.reshape(n, -1, 2, 16)
        rows[:, :size] = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(n, size)
    rows[:, size:] = (scales.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return rows


def dequantise(rows: U8, kind: Kind, k: int) -> F32:
    """float32 [n, k], the very numbers that kernels multiply with."""
    n, size = len(rows), code_bytes(kind, k)
    rows = np.ascontiguousarray(rows)
    scales = np.ascontiguousarray(rows[:, size:]).view("<u2").astype(np.uint32) << 16
    if kind.bits == 8:
        codes: NDArray[Any] = rows[:, :size].view(np.int8).astype(np.float32)
    else:
        blocks = rows[:, :size].reshape(n, -1, 1, 16)
        codes = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(n, -1).astype(np.float32) - 8
    weights: F32 = codes[:, :k] * np.repeat(scales.view(np.float32), kind.group, axis=1)[:, :k]
    return weights


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _bfloat16(values: F32) -> None:
    """Round to the nearest bfloat16, ties to even, in place."""
    bits = values.view(np.uint32)
    for i in range(bits.shape[0]):
        bits[i] = (bits[i] + np.uint32(0x7FFF) + (bits[i] >> np.uint32(16) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _eight(weights: F32, scales: F32, codes: NDArray[np.int8]) -> None:
    one = np.empty(1, np.float32)
    for r in range(weights.shape[0]):
        for g in range(weights.shape[1]):
            w = weights[r, g]
            one[0] = np.abs(w).max() / np.float32(127)
            _bfloat16(one)
            scale = one[0]
            scales[r, g] = scale
            inverse = np.float32(1) / scale if scale > _TINY else np.float32(0)
            for i in range(len(w)):
                codes[r, g, i] = min(max(np.rint(w[i] * inverse), -127), 127)


@njit(cache=True, nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _try(w: F32, scale: np.float32, codes: F32) -> tuple[np.float32, np.float32]:
    """Choose 4-bit codes for a scale; their square error, and the best scale for these codes.

    Sums may be taken in any order here, so that all lanes of the processor work.
    """
    inverse = np.float32(1) / scale if abs(scale) > _TINY else np.float32(0)
    error, product, square = np.float32(0), np.float32(0), np.float32(0)
    for i in range(w.shape[0]):
        code = np.rint(w[i] * inverse)
        code = min(max(code, np.float32(-8)), np.float32(7))
        codes[i] = code
        apart = w[i] - code * scale
        error += apart * apart
        product += code * w[i]
        square += code * code
    return error, product / square if square > 0 else scale


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _four(weights: F32, scales: F32, codes: NDArray[np.int8]) -> None:
    one = np.empty(1, np.float32)
    tried = np.empty(weights.shape[2], np.float32)
    for r in range(weights.shape[0]):
        for g in range(weights.shape[1]):
            w = weights[r, g]
            largest = np.abs(w).max()
            scales[r, g] = 0
            best, _ = _try(w, np.float32(0), tried)
            for sign in (-1, 1):
                for clip in range(_CLIPS):
                    one[0] = sign * largest / (_LEAST_CODE + np.float32(0.5) * clip)
                    for _ in range(2):
                        _bfloat16(one)
                        error, better = _try(w, one[0], tried)
                        if error < best:
                            best = error
                            scales[r, g] = one[0]
                        one[0] = better
            _try(w, scales[r, g], tried)
            for i in range(w.shape[0]):
                codes[r, g, i] = np.int8(tried[i])
