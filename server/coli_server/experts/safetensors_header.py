"""A strict reader of safetensors headers that knows where every tensor's bytes lie in the file.

The format (https://huggingface.co/docs/safetensors): a little-endian unsigned 64-bit header length, a
JSON object of that many bytes (it begins with `{` and may be padded with blanks), then the tensors'
bytes. Each entry is `{"dtype", "shape", "data_offsets": [begin, end]}`, relative to the end of the
header. The tensors cover the rest of the file exactly: no overlap, no hole. `__metadata__` maps text to
text. A header that breaks any of this is refused, and no byte outside the file is ever asked for.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from coli_server.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
MAX_RANK = 64  # NumPy's limit
MAX_DIMENSION = 1 << 48  # no real axis comes near; keeps hostile products cheap

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class CheckpointError(ModelError):
    """A checkpoint's files are missing, damaged or contradict each other; names file and tensor."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """`nbytes` contiguous bytes of `file` from the absolute byte `offset`."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: safetensors dtype name, shape, and its bytes' absolute place in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def whole(self) -> TensorSlice:
        return TensorSlice(self.file, self.offset, self.nbytes)

    def rows(self, begin: int, end: int) -> TensorSlice:
        """The bytes of rows `begin` to `end` (exclusive) of the first axis.

        Raises CheckpointError when the tensor has no such rows or a row is not a whole number of bytes.
        """
        if not self.shape or not 0 <= begin <= end <= self.shape[0]:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} of shape {list(self.shape)} has no rows {begin} to {end}"
            )
        row_bits = math.prod(self.shape[1:]) * DTYPE_BITS[self.dtype]
        if row_bits % 8:
            raise CheckpointError(
                f"{self.file}: a row of tensor {self.name!r} is not a whole number of bytes"
            )
        row = row_bits // 8
        return TensorSlice(self.file, self.offset + begin * row, (end - begin) * row)

    def row(self, index: int) -> TensorSlice:
        """The bytes of row `index` of the first axis: one expert of a fused tensor `[experts, ...]`."""
        return self.rows(index, index + 1)


def load_json(raw: bytes, file: Path) -> Any:
    """JSON as a checkpoint may contain it: UTF-8, no key twice in an object, no NaN or Infinity.

    Raises CheckpointError naming `file`.
    """
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {_one_line(error)}") from None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, by name, in the order of their bytes.

    Reads the header alone. Raises CheckpointError naming the file and, where there is one, the tensor.
    """
    raw, size = _header_bytes(file)
    document = load_json(raw, file)
    data_start = 8 + len(raw)
    tensors = []
    for name, entry in document.items():
        if name == "__metadata__":
            _check_metadata(entry, file)
        else:
            tensors.append(_tensor(name, entry, file, data_start, size))
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_coverage(tensors, file, data_start, size)
    return {tensor.name: tensor for tensor in tensors}


def _header_bytes(file: Path) -> tuple[bytes, int]:
    """The raw JSON header and the size of the file in bytes."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file}: not a regular file")
        with open(file, "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: {size} bytes are too few for a safetensors header")
            length = int.from_bytes(prefix, "little")
            limit = min(MAX_HEADER_BYTES, size - 8)
            if not 2 <= length <= limit:
                raise CheckpointError(f"{file}: header length {length} is outside 2 to {limit}")
            raw = _read_exactly(stream.fileno(), length, file)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if raw[:1] != b"{":
        raise CheckpointError(f"{file}: the header does not begin with '{{'")
    return raw, size


def _read_exactly(descriptor: int, length: int, file: Path) -> bytes:
    chunks = []
    while length:
        chunk = os.read(descriptor, length)
        if not chunk:
            raise CheckpointError(f"{file}: the file ends inside its header")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def _tensor(name: str, entry: Any, file: Path, data_start: int, size: int) -> TensorInfo:
    """Check one header entry by itself; `size` is the file's."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(file, name, "must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        _refuse(file, name, f"dtype {dtype!r} is not known")
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        _refuse(file, name, f"shape must be a list of at most {MAX_RANK} sizes")
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= MAX_DIMENSION:
            _refuse(file, name, f"shape has the size {dimension!r}, outside 0 to {MAX_DIMENSION}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
    ):
        _refuse(file, name, "data_offsets must be two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - data_start:
        _refuse(
            file,
            name,
            f"data_offsets [{begin}, {end}] are outside the file's {size - data_start} bytes of data",
        )
    if math.prod(shape) * bits != (end - begin) * 8:
        _refuse(file, name, f"{end - begin} bytes do not hold shape {shape} of {dtype}")
    if not _is_text(name):
        _refuse(file, name, "the name is not valid Unicode")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _check_coverage(tensors: list[TensorInfo], file: Path, data_start: int, size: int) -> None:
    """Tensors in order of offset must follow each other without overlap or hole up to the file's end."""
    position = data_start
    for tensor in tensors:
        if tensor.offset < position:
            _refuse(file, tensor.name, "overlaps the tensor before it")
        if tensor.offset > position:
            _refuse(file, tensor.name, f"leaves a hole of {tensor.offset - position} bytes before it")
        position += tensor.nbytes
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes at the end belong to no tensor")


def _check_metadata(entry: Any, file: Path) -> None:
    if not isinstance(entry, dict) or not all(
        isinstance(value, str) and _is_text(key) and _is_text(value) for key, value in entry.items()
    ):
        raise CheckpointError(f"{file}: __metadata__ must map text to text")


def _is_text(name: str) -> bool:
    """False for half of a surrogate pair, which JSON escapes can smuggle in and UTF-8 cannot hold."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} appears twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def _refuse(file: Path, name: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{file}: tensor {name!r}: {problem}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
