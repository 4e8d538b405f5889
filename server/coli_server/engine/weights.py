"""Dense weights: read once, kept in memory in the type in which they are stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.kernels import STORED_AS, Kind, row_bytes
from coli_server.engine.quantised import dequantise
from coli_server.engine.stored_form import StoredForm
from coli_server.errors import ModelError
from coli_server.experts import CheckpointIndex, HugePages, TensorInfo
from coli_server.ranges import Activations

F32 = NDArray[np.float32]
Stored = NDArray[Any]  # bfloat16 or float16 bits in uint16, float32, or quantised rows in uint8
KINDS = {"BF16": Kind.BF16, "F16": Kind.F16, "F32": Kind.F32}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [outputs, inputs] in its stored type, with an optional float32 bias [outputs].

    `data` is [outputs, inputs], or [outputs, row_bytes] where `kind` is quantised. `kind` also says how it is
    multiplied.
    """

    data: Stored
    kind: Kind
    inputs: int
    bias: F32 | None = None

    def __call__(self, x: F32, out: F32 | None = None) -> F32:
        """`x @ weight.T + bias`: float32 [tokens, inputs] -> [tokens, outputs]."""
        return kernels.linear(x, self.data, self.kind, self.bias, out)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: NDArray[np.int32]) -> F32:
        """The rows `ids` as float32 [len(ids), inputs]: an embedding lookup."""
        rows = self.data[ids]
        return (
            dequantise(rows, self.kind, self.inputs) if self.kind.quantised else to_float32(rows, self.kind)
        )


def to_float32(data: NDArray[np.uint16] | F32, kind: Kind) -> F32:
    """Exact conversion of stored weights, not quantised, to float32."""
    if kind.stored == Kind.BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if kind == Kind.F16:
        return data.view(np.float16).astype(np.float32)
    return np.asarray(data, np.float32)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored matrix [rows, columns]."""

    info: TensorInfo
    kind: Kind
    rows: int
    columns: int

    def items(self, kind: Kind) -> int:
        """Elements of the array that holds it as `kind`."""
        return self.rows * row_bytes(kind, self.columns) // int(np.dtype(STORED_AS[kind]).itemsize)


def _common_kind(pieces: Sequence[Piece]) -> Kind:
    """The stored type of all `pieces`, or float32 where they differ."""
    kinds = {piece.kind for piece in pieces}
    return kinds.pop() if len(kinds) == 1 else Kind.F32


class Weights:
    """Reads tensors of a checkpoint by name, checks their shapes and notes which ones were asked for.

    `form` says how a converted folder is stored, `activations` to what products round activations where
    weights are bfloat16.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        form: StoredForm | None = None,
        activations: Activations = "float32",
    ) -> None:
        self.index = index
        self.form = form
        self.activations = activations
        self._asked: set[str] = set()
        self._memory = HugePages()
        self.kinds: set[Kind] = set()
        self.nbytes = 0

    @property
    def asked(self) -> frozenset[str]:
        """The tensors that were asked for so far."""
        return frozenset(self._asked)

    def has(self, name: str) -> bool:
        return name in self.index

    def info(self, name: str, *shape: int) -> TensorInfo:
        """The tensor `name`, which must have `shape` and a floating-point type. Raises CheckpointError."""
        self._asked.add(name)
        found = self.index.expect(name, shape, KINDS)
        self.kinds.add(KINDS[found.dtype])
        return found

    def codes(self, name: str, *shape: int) -> TensorInfo:
        """The tensor `name` of packed bytes, which must have `shape`. Raises CheckpointError."""
        self._asked.add(name)
        return self.index.expect(name, shape, ("U8",))

    def vector(self, name: str, size: int) -> F32:
        """A norm weight or bias, as float32 [size]."""
        return self._read_f32(self.info(name, size))

    def multiplied(self, kind: Kind) -> Kind:
        """The kind by which weights stored as `kind` are multiplied."""
        if kind == Kind.BF16 and self.activations == "bfloat16":
            kind = Kind.BF16_DOT
        self.kinds.add(kind)
        return kind

    def matrix(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        bias: bool = False,
        exact: bool = False,
    ) -> Matrix:
        """The matrices `names` (hub names without `.weight`) stacked into one, and their biases.

        With `exact` activations are not rounded: for what chooses, where a small error makes a large one.
        """
        shapes = [(rows, inputs) for rows in outputs]
        data, kind = self.packed([f"{name}.weight" for name in names], shapes)
        stacked = None
        if bias:
            stacked = np.concatenate(
                [self.vector(f"{name}.bias", rows) for name, rows in zip(names, outputs, strict=True)]
            )
        kind = kind if exact else self.multiplied(kind)
        return Matrix(data.reshape(sum(outputs), -1), kind, inputs, stacked)

    def packed(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> tuple[Stored, Kind]:
        """Matrices one behind the other in one flat array; in float32 where their stored types differ."""
        pieces = [self._piece(name, *shape) for name, shape in zip(names, shapes, strict=True)]
        kind = _common_kind(pieces)
        self.kinds.add(kind)
        return self._read_packed(pieces, kind), kind

    def _piece(self, name: str, rows: int, columns: int) -> Piece:
        """The matrix `name`; only that of a converted folder may be of bytes. Raises CheckpointError."""
        dense = None if self.form is None else self.form.dense
        if dense is not None and name in self.index and self.index[name].dtype == "U8":
            return Piece(self.codes(name, rows, row_bytes(dense, columns)), dense, rows, columns)
        info = self.info(name, rows, columns)
        return Piece(info, KINDS[info.dtype], rows, columns)

    def embeddings(self, name: str, vocab: int, hidden: int) -> Matrix:
        """The embedding table [vocab, hidden], which may be the head too."""
        data, kind = self.packed([name], [(vocab, hidden)])
        return Matrix(data.reshape(vocab, -1), self.multiplied(kind), hidden)

    def _read_f32(self, info: TensorInfo) -> F32:
        data = self.index.read_f32(info.name)
        self.nbytes += data.nbytes
        return data

    def _read_packed(self, pieces: Sequence[Piece], kind: Kind) -> Stored:
        """Values of `pieces` as `kind`, flat."""
        dtype, at = np.dtype(STORED_AS[kind]), 0
        size = dtype.itemsize * sum(piece.items(kind) for piece in pieces)
        data: Stored = self._memory.take(size).view(dtype)
        for piece in pieces:
            part = data[at : at + piece.items(kind)]
            if piece.kind == kind:
                self.index.read(piece.info.name, part)
            else:
                part[:] = self._widened(piece)
            at += part.size
        self.nbytes += data.nbytes
        return data

    def _widened(self, piece: Piece) -> F32:
        if piece.kind.quantised:
            return dequantise(self.index.read(piece.info.name), piece.kind, piece.columns).reshape(-1)
        return self.index.read_f32(piece.info.name).reshape(-1)

    def refuse_unknown(self, ignored: Sequence[str]) -> None:
        """Raise ModelError for a tensor that nobody asked for and that no pattern of `ignored` matches."""
        patterns = [re.compile(pattern) for pattern in ignored]
        for name, info in self.index.items():
            if name not in self._asked and not any(pattern.fullmatch(name) for pattern in patterns):
                raise ModelError(
                    f"{info.file}: tensor {name} has no place in this model as config.json describes it"
                )


class HeadersOnly(Weights):
    """Stands in for `weights` where only names, shapes and types count: reads nothing, holds zeros."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.index, weights.form, weights.activations)
        self._asked = set(weights._asked)
        self.kinds = weights.kinds  # which kernels will run is known from headers

    def _read_f32(self, info: TensorInfo) -> F32:
        return np.broadcast_to(np.zeros((), np.float32), info.shape)

    def _read_packed(self, pieces: Sequence[Piece], kind: Kind) -> Stored:
        return np.broadcast_to(np.zeros((), STORED_AS[kind]), sum(piece.items(kind) for piece in pieces))
