"""Memory for expert slots: one anonymous mapping on huge pages, cut into a slab for each layer."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ConfigurationError
from coli_server.experts.layout import PAGE, PART_ALIGNMENT, align

HUGE_PAGE = 2 * 1024 * 1024


def slab_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of one layer's slab: its slots, rounded up to whole pages."""
    return align(slots * slot_bytes, PAGE)


class Arena:
    """Zeroed private memory that begins on a huge page, cut into consecutive pieces of the given sizes.

    The layers' slabs share one mapping, so that slabs far smaller than a huge page still lie on huge pages
    and none is rounded up to one. Memory is used from the first write to it on. Reads into huge pages are
    about three times faster than into small ones; `mmap` shares memory by default, which the kernel never
    puts on huge pages, hence MAP_PRIVATE.

    Raises ConfigurationError when the kernel refuses so much memory.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.nbytes = sum(sizes)
        length = align(max(self.nbytes, 1), HUGE_PAGE)
        try:
            self._mapping = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigurationError(
                f"the system refuses {length} bytes of memory for experts ({error}); lower --ram"
            ) from None
        with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._mapping, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self.address = whole.ctypes.data + start
        self._memory = whole[start : start + length]
        self.offsets: list[int] = []
        end = 0
        for size in sizes:
            self.offsets.append(end)
            end += size

    def piece(self, index: int, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes of piece `index`, as a view."""
        offset = self.offsets[index]
        return self._memory[offset : offset + size]


class HugePages:
    """Memory for weights that stay: pieces of any size, one behind the other on huge pages.

    NumPy asks for huge pages only for arrays of 4 MB and more, and a product that streams a smaller matrix
    from small pages loses half of its time to address translation.
    """

    _CHUNK = 32 * HUGE_PAGE  # of address space; memory is used as it is written

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._left = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` writable bytes that begin on a cache line. Raises ConfigurationError like `Arena`."""
        size = align(nbytes, PART_ALIGNMENT)
        if self._arena is None or size > self._left:
            self._arena = Arena([max(size, self._CHUNK)])
            self._left = self._arena.nbytes
        begin = self._arena.nbytes - self._left
        self._left -= size
        return self._arena.piece(0, begin + nbytes)[begin:]
