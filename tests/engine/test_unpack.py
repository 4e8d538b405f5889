"""Stored experts in the form that the kernels read: MXFP4 and input-major matrices."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.kernels.unpack import transpose, unpack_mxfp4
from coli_server.engine.model import Checkpoint
from coli_server.engine.packed_experts import Unpack

MODELS = Path(__file__).parents[1] / "data" / "models"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def widened(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> list[float]:
    return (bits.astype(np.uint32) << 16).view(np.float32).tolist()


@pytest.mark.parametrize("scale", [0, 1, 2, 100, 126, 127, 128, 200, 251])
def test_every_mxfp4_value_is_exact(scale: int) -> None:
    blocks = np.arange(256, dtype=np.uint8)  # 512 weights: every pair of codes, low half first
    out = np.zeros(512, np.uint16)
    unpack_mxfp4(blocks, np.full(16, scale, np.uint8), out)
    signed = [*VALUES, *(-value for value in VALUES)]
    expected = [
        signed[code] * 2.0 ** (scale - 127) for byte in range(256) for code in (byte % 16, byte // 16)
    ]
    assert widened(out) == expected
    assert [np.signbit(value) for value in widened(out)] == [np.signbit(value) for value in expected]


def test_a_scale_belongs_to_32_weights() -> None:
    out = np.zeros(96, np.uint16)
    unpack_mxfp4(np.full(48, 0x22, np.uint8), np.array([127, 128, 126], np.uint8), out)
    assert widened(out) == [1.0] * 32 + [2.0] * 32 + [0.5] * 32


def test_scales_beyond_bfloat16_are_infinite_or_not_a_number() -> None:
    out = np.zeros(32, np.uint16)
    unpack_mxfp4(np.full(16, 0x77, np.uint8), np.array([254], np.uint8), out)
    assert widened(out) == [np.inf] * 32
    unpack_mxfp4(np.full(16, 0x22, np.uint8), np.array([255], np.uint8), out)
    assert np.isnan(widened(out)).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not make"):
        unpack_mxfp4(np.zeros(16, np.uint8), np.zeros(2, np.uint8), np.zeros(32, np.uint16))
    with pytest.raises(ValueError, match="do not fit"):
        transpose(np.zeros((2, 3), np.uint16), np.zeros((2, 3), np.uint16))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (64, 64), (65, 129), (200, 7)])
def test_transposing(shape: tuple[int, int], dtype: type[np.unsignedinteger]) -> None:  # type: ignore[type-arg]
    x = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(dtype)
    out = np.zeros(shape[::-1], dtype)
    transpose(x, out)
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "gpt_oss-window"])
def test_a_slot_holds_row_major_matrices_and_float_biases(name: str) -> None:
    checkpoint = Checkpoint.open(MODELS / name)
    spec, index, files = checkpoint.spec, checkpoint.weights.index, checkpoint.experts[1].files
    hidden, width, parts = spec.hidden, spec.moe.width, files.layout.parts
    assert isinstance(files.layout.transform, Unpack)
    engine = Engine.open(MODELS / name, warm=False)
    prefix = "model.layers.1.mlp.experts."
    with engine.cache.stream(1, np.array([2], np.int32)) as stream:
        for lease in stream:
            slot = _memory(int(lease.addresses[0]), files.layout.slot_bytes)
            found = {key: slot[part.offset : part.offset + part.nbytes] for key, part in parts.items()}
            for part in ("gate_up", "down"):
                bias = index.read_f32(f"{prefix}{part}_proj_bias")[2]
                np.testing.assert_array_equal(found[f"{part}_bias"].view(np.float32), bias)
                matrix = found[part].view(np.uint16).reshape(-1, hidden if part == "gate_up" else width)
                if not spec.moe.mxfp4:
                    stored = index.read(f"{prefix}{part}_proj")[2]
                    np.testing.assert_array_equal(matrix, stored.T)
                    continue
                unit = 2.0 ** (float(index.read(f"{prefix}{part}_proj_scales")[2, 5, 0]) - 127)
                code = index.read(f"{prefix}{part}_proj_blocks")[2, 5, 0, 3]
                signed = [*VALUES, *(-value for value in VALUES)]
                assert widened(matrix[5, 6:8]) == [signed[code % 16] * unit, signed[code // 16] * unit]
    engine.close()


def _memory(address: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8).copy()
