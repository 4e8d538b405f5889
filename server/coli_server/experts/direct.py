"""Reads past the page cache (O_DIRECT): faster from a quick disk, and the memory stays for experts."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coli_server.experts.layout import PAGE, Bytes, align
from coli_server.experts.reader import PreadReader

log = logging.getLogger("coli.experts")

MOST_BUFFER_BYTES = 8 << 20  # of one read; larger ones are not faster


def buffer_bytes(largest_read: int) -> int:
    """Bytes of the buffer that each read thread needs, for reads of up to `largest_read` bytes."""
    return min(MOST_BUFFER_BYTES, align(largest_read, PAGE) + PAGE)


class DirectReader:
    """Reads whole pages of the disk into an aligned buffer of each thread, and copies what is wanted.

    Pieces that lie on pages in the file and in memory are read in place. Where the file system has no
    direct reads, it reads through the page cache like `PreadReader`, and says so once.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._size = buffer_bytes
        self._direct = PreadReader(flags=os.O_DIRECT)
        self._plain = PreadReader()
        self._refused = False
        self._lock = threading.Lock()
        self._local = threading.local()

    def preadv(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._refused:
            try:
                return self._read(file, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuse(file)
        return self._plain.preadv(file, buffers, offset)

    def close(self) -> None:
        self._direct.close()
        self._plain.close()

    def _read(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        views = [np.frombuffer(view, np.uint8) for view in buffers]
        if offset % PAGE == 0 and all(view.ctypes.data % PAGE == view.size % PAGE == 0 for view in views):
            return self._direct.preadv(file, buffers, offset)
        head = offset % PAGE
        wanted = align(head + sum(view.size for view in views), PAGE)
        buffer = self._buffer()
        count = self._direct.preadv(file, [buffer.data[: min(wanted, self._size)]], offset - head)
        return _scatter(buffer[head : max(count, head)], views)

    def _buffer(self) -> Bytes:
        """This thread's own, on pages."""
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            mapping = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = self._local.buffer = np.frombuffer(mapping, np.uint8)
        return buffer

    def _refuse(self, file: Path) -> None:
        with self._lock:
            if not self._refused:
                self._refused = True
                log.warning("%s: no direct reads from here; reading through the page cache", file.parent)


def _scatter(source: Bytes, views: Sequence[Bytes]) -> int:
    """Copy `source` into `views`, one after the other; the number of bytes that found room."""
    done = 0
    for view in views:
        part = source[done : done + view.size]
        np.copyto(view[: part.size], part)  # releases the interpreter lock, unlike a memoryview
        done += part.size
    return done
