"""The index of a checkpoint folder: every tensor of every safetensors shard, found from headers alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.experts.reader import PreadReader, read_fully
from coli_server.experts.safetensors_header import (
    MAX_HEADER_BYTES,
    CheckpointError,
    TensorInfo,
    load_json,
    read_header,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_CONVERT_CHUNK = 1 << 22  # bytes converted at a time, so that widening needs no second copy of the tensor

# bfloat16, float16 and 8-bit floats are handed out as their raw bits: NumPy lacks most of them.
_STORED_AS = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<u2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}


class CheckpointIndex(Mapping[str, TensorInfo]):
    """Every tensor of a folder, by name. Build one with `open`; it holds no file open."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = tensors

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> CheckpointIndex:
        """Read the headers of the shards in `folder`; no tensor data is read.

        With `model.safetensors.index.json` the shards that it names are read and compared with it; without,
        `model.safetensors`, or else every `*.safetensors`. Raises CheckpointError naming file and tensor.
        """
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(f"{root}: no such folder")
        weight_map = _read_weight_map(root / INDEX_FILE)
        tensors = _read_shards(_shards(root, weight_map))
        for name, shard in weight_map.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{root / shard}: tensor {name!r} is in {INDEX_FILE} but not in this file"
                )
            if tensors[name].file.name != shard:
                raise CheckpointError(
                    f"{root / shard}: tensor {name!r} is in {tensors[name].file.name} instead"
                )
        return cls(root, tensors)

    def __getitem__(self, name: str) -> TensorInfo:
        """Raises CheckpointError, not KeyError: a missing tensor is a fault of the folder."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def expect(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: Collection[str] | None = None
    ) -> TensorInfo:
        """The tensor, checked; raises CheckpointError when it is missing or has another shape or dtype."""
        tensor = self[name]
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if dtypes is not None and tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, "
                f"expected {' or '.join(sorted(dtypes))}"
            )
        return tensor

    def read(self, name: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The tensor's values in its shape; bfloat16 and float16 as uint16 bits, 8-bit floats as uint8.

        They are read into `out`, C-contiguous and of as many bytes, if it is given.

        Raises CheckpointError for a dtype whose elements are not whole bytes and for a file that fails,
        ValueError for an `out` of another size.
        """
        tensor = self[name]
        stored = _STORED_AS.get(tensor.dtype)
        if stored is None:
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: dtype {tensor.dtype} cannot be read")
        if out is None:
            out = np.empty(tensor.shape, stored)
        elif out.nbytes != tensor.nbytes:
            raise ValueError(f"{name!r} has {tensor.nbytes} bytes, but there is room for {out.nbytes}")
        _read_into(tensor, 0, out.reshape(-1).view(np.uint8))
        return out.reshape(-1).view(stored).reshape(tensor.shape)

    def read_f32(self, name: str) -> NDArray[np.float32]:
        """The tensor's values widened (or, from F64, rounded) to float32.

        Raises CheckpointError for dtypes other than BF16, F16, F32 and F64.
        """
        tensor = self[name]
        if tensor.dtype not in ("BF16", "F16", "F32", "F64"):
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, expected BF16, F16, F32 or F64"
            )
        out = np.empty(tensor.shape, np.float32)
        flat = out.reshape(-1)
        if tensor.dtype == "F32":
            _read_into(tensor, 0, flat.view(np.uint8))
            return out
        stored = np.dtype(_STORED_AS[tensor.dtype])
        step = _CONVERT_CHUNK // stored.itemsize
        chunk = np.empty(min(step, flat.size), stored)
        for begin in range(0, flat.size, step):
            part = chunk[: flat.size - begin]
            _read_into(tensor, begin * stored.itemsize, part.view(np.uint8))
            flat[begin : begin + part.size] = _to_f32(part, tensor.dtype)
        return out


def _to_f32(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return values.view(np.float16)
    return values


def _read_into(tensor: TensorInfo, skip: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` from the tensor's bytes, beginning at its byte `skip`."""
    if not out.size:
        return
    reader = PreadReader()
    try:
        read_fully(reader, tensor.file, [out.data], tensor.offset + skip)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {error.strerror}") from None
    finally:
        reader.close()


def _read_weight_map(file: Path) -> dict[str, str]:
    """Tensor name to shard file name; empty when there is no index file."""
    try:
        if file.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: larger than {MAX_HEADER_BYTES} bytes")
        document = load_json(file.read_bytes(), file)
    except FileNotFoundError:
        if file.is_symlink():
            raise CheckpointError(f"{file}: broken symbolic link") from None
        return {}
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map must be an object with at least one tensor")
    plain: set[str] = set()
    for name, shard in weight_map.items():
        if isinstance(shard, str) and (shard in plain or _is_plain_name(shard)):
            plain.add(shard)
        else:
            raise CheckpointError(
                f"{file}: tensor {name!r}: {shard!r} is not the plain name of a .safetensors file"
            )
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard.endswith(".safetensors") and not any(character in shard for character in "/\\\0\r\n")


def _shards(root: Path, weight_map: dict[str, str]) -> list[Path]:
    if weight_map:
        return [root / shard for shard in sorted(set(weight_map.values()))]
    if os.path.lexists(root / SINGLE_FILE):
        return [root / SINGLE_FILE]
    found = sorted(root.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{root}: no .safetensors file in this folder")
    return found


def _read_shards(shards: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        header = read_header(shard)
        if not tensors.keys().isdisjoint(header):
            name = min(tensors.keys() & header.keys())
            raise CheckpointError(f"{shard}: tensor {name!r} is also in {tensors[name].file.name}")
        tensors.update(header)
    return tensors
