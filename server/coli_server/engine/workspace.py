"""Scratch memory that is allocated once and reused by every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Workspace:
    """Named float32 buffers that only grow; a view is valid until the same name is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.float32]] = {}
        self._taken: dict[str, NDArray[np.float32]] = {}
        self._rows: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An uninitialised C-contiguous array of `shape`."""
        taken = self._taken.get(name)
        if taken is not None and taken.shape == shape:
            return taken
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        taken = self._taken[name] = buffer[:size].reshape(shape)
        return taken

    def all_rows(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """0 to `count` - 1, and the starts of a single group of them: int32 [count] and [0, count]."""
        found = self._rows.get(count)
        if found is None:
            found = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
            self._rows[count] = found
        return found

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
