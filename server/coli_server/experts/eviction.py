"""Which expert a full layer gives up. Policies know expert ids only.

Every operation is O(1), amortised; `victim` looks at one expert more for each that it must keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The evictable experts of one layer. Pinned, loading and needed experts are not in here.

    An expert that a running step needs is removed and inserted again afterwards, so that a policy can
    never name it as a victim; what a policy remembers of an expert may outlive its removal.
    """

    def insert(self, expert: int) -> None:
        """`expert`, not in here, becomes evictable; it was used just now."""
        ...

    def offer(self, expert: int) -> None:
        """`expert`, not in here, becomes evictable, before all others: it was read, but not used yet."""
        ...

    def touch(self, expert: int) -> None:
        """`expert`, in here, was used just now."""
        ...

    def remove(self, expert: int) -> None:
        """`expert`, in here, is no longer evictable."""
        ...

    def victim(self, *keep: Container[int]) -> int | None:
        """The expert to give up next that is in none of `keep` (it stays in here), or None without one."""
        ...


class LRU:
    """Gives up the expert whose last use is longest ago. Iterates from that one to the latest."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self.touch: Callable[[int], None] = self._order.move_to_end

    def insert(self, expert: int) -> None:
        self._order[expert] = None

    def offer(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert, last=False)

    def remove(self, expert: int) -> None:
        del self._order[expert]

    def victim(self, *keep: Container[int]) -> int | None:
        return next((e for e in self._order if not any(e in kept for kept in keep)), None)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
