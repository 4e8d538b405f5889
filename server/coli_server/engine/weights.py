"""Dense weights: read once, kept in memory in the type in which they are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.kernels import Kind
from coli_server.errors import ModelError
from coli_server.experts import CheckpointIndex, TensorInfo

F32 = NDArray[np.float32]
KINDS = {"BF16": Kind.BF16, "F16": Kind.F16, "F32": Kind.F32}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [outputs, inputs] in its stored type, with an optional float32 bias [outputs]."""

    data: NDArray[np.uint16] | F32
    kind: Kind
    bias: F32 | None = None

    def __call__(self, x: F32, out: F32 | None = None) -> F32:
        """`x @ weight.T + bias`: float32 [tokens, inputs] -> [tokens, outputs]."""
        return kernels.linear(x, self.data, self.kind, self.bias, out)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: NDArray[np.int32]) -> F32:
        """The rows `ids` as float32 [len(ids), inputs]: an embedding lookup."""
        return to_float32(self.data[ids], self.kind)


def to_float32(data: NDArray[np.uint16] | F32, kind: Kind) -> F32:
    """Exact conversion of stored weights to float32."""
    if kind == Kind.BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if kind == Kind.F16:
        return data.view(np.float16).astype(np.float32)
    return np.asarray(data, np.float32)


def _common_kind(infos: Sequence[TensorInfo]) -> Kind:
    """The stored type of all `infos`, or float32 where they differ."""
    kinds = {KINDS[info.dtype] for info in infos}
    return kinds.pop() if len(kinds) == 1 else Kind.F32


class Weights:
    """Reads tensors of a checkpoint by name, checks their shapes and notes which ones were asked for."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._asked: set[str] = set()
        self.kinds: set[Kind] = set()
        self.nbytes = 0

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

    def matrix(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool = False
    ) -> Matrix:
        """The matrices `names` (hub names without `.weight`) stacked into one, and their biases."""
        shapes = [(rows, inputs) for rows in outputs]
        data, kind = self.packed([f"{name}.weight" for name in names], shapes)
        stacked = None
        if bias:
            stacked = np.concatenate(
                [self.vector(f"{name}.bias", rows) for name, rows in zip(names, outputs, strict=True)]
            )
        return Matrix(data.reshape(-1, inputs), kind, stacked)

    def packed(
        self, names: Sequence[str], shapes: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.uint16] | F32, Kind]:
        """Tensors one behind the other in one flat array; in float32 where their stored types differ."""
        infos = [self.info(name, *shape) for name, shape in zip(names, shapes, strict=True)]
        kind = _common_kind(infos)
        return self._read_packed(infos, kind), kind

    def embeddings(self, name: str, vocab: int, hidden: int) -> Matrix:
        """The embedding table [vocab, hidden]."""
        data, kind = self.packed([name], [(vocab, hidden)])
        return Matrix(data.reshape(vocab, hidden), kind)

    def _read_f32(self, info: TensorInfo) -> F32:
        data = self.index.read_f32(info.name)
        self.nbytes += data.nbytes
        return data

    def _read_packed(self, infos: Sequence[TensorInfo], kind: Kind) -> NDArray[np.uint16] | F32:
        """Values of `infos` as `kind`, flat."""
        read = self.index.read_f32 if kind == Kind.F32 else self.index.read
        if len(infos) == 1:  # as it comes: a copy of a large table would need its memory twice
            data = read(infos[0].name).reshape(-1)
        else:
            size = sum(math.prod(info.shape) for info in infos)
            data, at = np.empty(size, np.float32 if kind == Kind.F32 else np.uint16), 0
            for info in infos:
                part = read(info.name).reshape(-1)
                data[at : at + part.size] = part
                at += part.size
        self.nbytes += data.nbytes
        return data

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
        super().__init__(weights.index, weights.form)
        self._asked = set(weights._asked)
        self.kinds = weights.kinds  # which kernels will run is known from headers

    def _read_f32(self, info: TensorInfo) -> F32:
        return np.broadcast_to(np.zeros((), np.float32), info.shape)

    def _read_packed(self, infos: Sequence[TensorInfo], kind: Kind) -> NDArray[np.uint16] | F32:
        size = sum(math.prod(info.shape) for info in infos)
        if kind == Kind.F32:
            return np.broadcast_to(np.zeros((), np.float32), size)
        return np.broadcast_to(np.zeros((), np.uint16), size)
