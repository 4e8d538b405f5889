"""Reading bytes of checkpoint files into memory: the one seam between the cache and the file system."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Reader(Protocol):
    """Positional scatter reads. `preadv` is called by several threads at once."""

    def preadv(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in order from the byte `offset` of `file`; the number of bytes read.

        May read less than asked, as preadv(2) may; 0 means the end of the file. Raises OSError.
        """
        ...

    def close(self) -> None:
        """Give back every resource; no read is running or follows."""
        ...


def read_fully(reader: Reader, file: Path, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill `buffers` completely, however often the reader stops short or is interrupted.

    Raises OSError, also (EIO) for a file that ends too early.
    """
    rest = list(buffers)
    while rest:
        try:
            count = reader.preadv(file, rest, offset)
        except InterruptedError:
            continue
        except OSError as error:
            if error.filename is None:
                error.filename = str(file)
            raise
        if count <= 0:
            missing = sum(len(view) for view in rest)
            raise OSError(errno.EIO, f"the file ends at byte {offset}, {missing} bytes too early", str(file))
        offset += count
        rest = _after(rest, count)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` behind the first `count` bytes."""
    for index, view in enumerate(buffers):
        if count < len(view):
            return [view[count:], *buffers[index + 1 :]]
        count -= len(view)
    return []


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    readers: int = 0


class PreadReader:
    """preadv(2) through a bounded set of open files.

    Files open on first use. At most `max_open` stay open beyond those being read: the ones unused for
    longest close first, so that a model of hundreds of shards fits any descriptor limit. A file that was
    exchanged for another one between two uses is refused: its old header no longer describes it. `flags`
    are added to those of open(2).
    """

    def __init__(self, max_open: int | None = None, flags: int = 0) -> None:
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._max_open = _default_max_open() if max_open is None else max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._identity: dict[Path, tuple[int, int]] = {}

    def preadv(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        handle = self._acquire(file)
        try:
            return os.preadv(handle.descriptor, buffers, offset)
        finally:
            self._release(handle)

    def close(self) -> None:
        with self._lock:
            for handle in self._open.values():
                os.close(handle.descriptor)
            self._open.clear()

    def _acquire(self, file: Path) -> _OpenFile:
        with self._lock:
            handle = self._open.get(file)
            if handle is None:
                handle = _OpenFile(self._open_checked(file))
                self._open[file] = handle
            else:
                self._open.move_to_end(file)
            handle.readers += 1
            return handle

    def _open_checked(self, file: Path) -> int:
        descriptor = os.open(file, self._flags)
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identity.setdefault(file, identity) != identity:
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the file was exchanged while the model was running", str(file))
        return descriptor

    def _release(self, handle: _OpenFile) -> None:
        with self._lock:
            handle.readers -= 1
            if len(self._open) > self._max_open:
                self._close_idle()

    def _close_idle(self) -> None:
        """Close the file unused for longest that nobody reads; called with the lock held."""
        for file, handle in self._open.items():
            if not handle.readers:
                os.close(handle.descriptor)
                del self._open[file]
                return


def _default_max_open() -> int:
    """A quarter of the descriptors that this process may open, so that sockets have the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 512
    return max(4, min(512, soft // 4))
