"""Bringing stored expert weights into the form that the kernels read, on the threads that read them."""

from typing import Any, Final

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

MXFP4_BLOCK: Final = 32
"""Weights that share a scale in MXFP4: 16 bytes, two weights each."""

_TILE = 64
"""Rows and columns transposed together: few enough for the first cache."""


def _mxfp4_table() -> Array:
    """bfloat16 bits of every pair of scale and code: uint16 [256, 16]. All of them are exact.

    A code is sign, two bits of exponent and one of mantissa (E2M1); a scale is a power of two, 127 standing
    for 1 and 255 for NaN (E8M0). OCP Microscaling Formats 1.0.
    """
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = np.concatenate([magnitudes, -magnitudes])
    scales = np.ldexp(1.0, np.arange(256) - 127)
    scales[255] = np.nan
    with np.errstate(over="ignore"):  # the largest scales overflow to infinity, as in any bfloat16
        values = (scales[:, None] * codes).astype(np.float32)
    bits: Array = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


_MXFP4_TABLE = _mxfp4_table()


@njit(nogil=True, cache=True)
def _unpack_mxfp4(table, blocks, scales, out):  # type: ignore[no-untyped-def]
    for g in range(scales.shape[0]):
        values = table[scales[g]]
        for i in range(16):
            pair = blocks[16 * g + i]
            out[32 * g + 2 * i] = values[pair & 15]
            out[32 * g + 2 * i + 1] = values[pair >> 4]


def unpack_mxfp4(blocks: Array, scales: Array, out: Array) -> None:
    """Fill `out`, bfloat16 bits in uint16 [n], from MXFP4: blocks uint8 [n / 2], low half first, and scales
    uint8 [n / 32]. Every value is exact.

    Raises ValueError where the sizes do not fit together.
    """
    if blocks.size * 2 != out.size or scales.size * MXFP4_BLOCK != out.size:
        raise ValueError(f"{blocks.size} bytes and {scales.size} scales do not make {out.size} weights")
    _unpack_mxfp4(_MXFP4_TABLE, blocks, scales, out)


@njit(nogil=True, cache=True)
def _transpose(x, out):  # type: ignore[no-untyped-def]
    rows, columns = x.shape
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            for c in range(column, min(columns, column + _TILE)):
                for r in range(row, min(rows, row + _TILE)):
                    out[c, r] = x[r, c]


def transpose(x: Array, out: Array) -> None:
    """out[j, i] = x[i, j]: x [n, m], out [m, n], both uint16 or both uint32, C-contiguous."""
    if x.shape != out.shape[::-1]:
        raise ValueError(f"x {x.shape} and out {out.shape} do not fit together")
    _transpose(x, out)
