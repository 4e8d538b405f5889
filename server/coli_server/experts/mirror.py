"""A second copy of the checkpoint, on another disk, that shares the reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from coli_server.errors import ConfigurationError
from coli_server.experts.reader import Reader

log = logging.getLogger("coli.experts")


class MirrorReader:
    """Takes each read to the copy that has less to do: `files` or the files of their names in `mirror`.

    The first read that the mirror cannot serve ends its use, with one warning; it and all others are served
    by the first copy.
    """

    def __init__(self, inner: Reader, files: Collection[Path], mirror: Path) -> None:
        self._inner = inner
        self._copies = {file: mirror / file.name for file in files}
        self._mirror = mirror
        self._in_use = True
        self._lock = threading.Lock()
        self._pending = [0, 0]  # bytes being read from the first copy, from the mirror
        self._turn = 0
        self.read_bytes = [0, 0]  # from the first copy, from the mirror

    def preadv(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        size = sum(len(view) for view in buffers)
        copy = self._copies.get(file)
        side = self._begin(size, mirrored=copy is not None)
        try:
            if side and copy is not None:
                try:
                    count = self._inner.preadv(copy, buffers, offset)
                except InterruptedError:
                    raise
                except OSError as error:
                    self._give_up(copy, error.strerror or str(error))
                else:
                    if count > 0:
                        return self._count(side, count)
                    self._give_up(copy, f"the file ends at byte {offset}")
            return self._count(0, self._inner.preadv(file, buffers, offset))
        finally:
            with self._lock:
                self._pending[side] -= size

    def close(self) -> None:
        self._inner.close()

    def _begin(self, size: int, *, mirrored: bool) -> int:
        with self._lock:
            side = 0
            if mirrored and self._in_use:
                first, mirror = self._pending
                side = self._turn if first == mirror else int(mirror < first)
                self._turn = 1 - side
            self._pending[side] += size
            return side

    def _count(self, side: int, count: int) -> int:
        with self._lock:
            self.read_bytes[side] += count
        return count

    def _give_up(self, file: Path, reason: str) -> None:
        with self._lock:
            first, self._in_use = self._in_use, False
        if first:
            log.warning("the mirror is not used any more: cannot read %s: %s", file, reason)


def check_mirror(files: Collection[Path], mirror: Path) -> None:
    """See that `mirror` has files of the same names, sizes and headers.

    Raises ConfigurationError naming the first that differs.
    """
    for file in sorted(files):
        copy = mirror / file.name
        try:
            if _head(copy) != _head(file):
                raise ConfigurationError(f"--mirror={mirror}: {copy} is not a copy of {file}")
        except OSError as error:
            raise ConfigurationError(f"--mirror={mirror}: {copy}: {error.strerror}") from None


def _head(file: Path) -> tuple[int, bytes]:
    """The size of a safetensors file and everything in front of its data."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = file.stat().st_size
        return size, prefix + stream.read(min(int.from_bytes(prefix, "little"), size))
