"""Streams of leases: what one step wants of one layer, resident experts first, loaded ones as they come."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError
from coli_server.experts.loading import Loads
from coli_server.experts.pool import ReadJob
from coli_server.experts.slots import LayerSlots


class ExpertReadError(ModelError):
    """Experts of one layer could not be read. `expert`, `file` and the message are those of the first.

    `experts` has every one that failed in the same stream; all others of that stream were leased.
    """

    def __init__(self, layer: int, expert: int, file: Path, reason: str, experts: tuple[int, ...]) -> None:
        super().__init__(f"layer {layer}, expert {expert}: cannot read {file}: {reason}")
        self.layer = layer
        self.expert = expert
        self.file = file
        self.experts = experts


class Lease(NamedTuple):
    """Experts that may be used now: their ids int32 [n] and the addresses int64 [n] of their slots."""

    experts: NDArray[np.int32]
    addresses: NDArray[np.int64]


class ExpertStream(Iterator[Lease], AbstractContextManager["ExpertStream"]):
    """Iterates over leases that together hold every wanted expert once.

    `loads` has (expert, bytes in the files) of each expert that was read for this stream so far, in order
    of completion; what a prefetch had begun to read is not among them. Leaving the context, like `close`,
    gives everything back; so does the end of the iteration.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.loads: list[tuple[int, int]] = []

    def close(self) -> None:
        """End every lease. May be called at any time and more than once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ResidentStream(ExpertStream):
    """Everything is resident: one lease, and nothing to give back, as nothing else loads meanwhile."""

    def __init__(self, slots: LayerSlots, wanted: list[int], ids: NDArray[np.int32]) -> None:
        """`wanted` and `ids` are the same experts."""
        super().__init__(slots.layer)
        self._lease: Lease | None = Lease(ids, slots.address[ids]) if wanted else None
        touch, pinned = slots.policy.touch, slots.pinned
        for expert in [expert for expert in wanted if expert not in pinned] if pinned else wanted:
            touch(expert)

    def __next__(self) -> Lease:
        if self._lease is None:
            raise StopIteration
        lease, self._lease = self._lease, None
        return lease

    def close(self) -> None:
        self._lease = None


class LoadingStream(ExpertStream):
    """Some experts are missing. Their reads begin at once, as many as there are slots for.

    The wanted experts leave the eviction policy until the end, so that no load can evict one. When they are
    more than the evictable slots, the slots of `expendable` ones are taken once these have been used. Those
    are the first of (resident, then being prefetched, then missing) that do not fit: who has a slot must be
    able to hand it on, and which experts remain at the end does not depend on which read was the fastest.
    The policy gets the survivors back in the order of `wanted`.

    `late` are prefetches of wanted experts that are still loading, each with whether its read had begun.
    Prefetches of other experts whose read has begun keep their slots until it ends.
    """

    def __init__(
        self, slots: LayerSlots, wanted: list[int], loads: Loads, late: Mapping[ReadJob, bool]
    ) -> None:
        super().__init__(slots.layer)
        self._slots = slots
        self._wanted = wanted
        self._loads = loads
        self._in_flight = set(late)
        self._begun = {job for job, begun in late.items() if begun}
        self._failed: list[ReadJob] = []
        self._open = True
        self._waited_before = loads.wait_seconds
        self._hits = [expert for expert in wanted if expert in slots.slot_of]
        absent = [expert for expert in wanted if expert not in slots.slot_of]
        coming = {job.expert for job in late}
        self._missing = deque(expert for expert in absent if expert not in coming)
        self._leased: list[int] = []
        self._used: deque[int] = deque()  # expendable, and not needed any more
        protected = [expert for expert in self._hits if expert not in slots.pinned]
        order = [*protected, *(expert for expert in absent if expert in coming), *self._missing]
        room = slots.evictable - len(slots.prefetching)
        self._expendable = set(order[: max(0, len(order) - room)])
        for expert in protected:
            slots.policy.remove(expert)
        self._submit()

    def __next__(self) -> Lease:
        """The next lease; the one before it ends. Blocks until an expert is loaded where none is.

        Raises ExpertReadError, after everything else was leased, when experts could not be read.
        """
        self._used.extend(expert for expert in self._leased if expert in self._expendable)
        self._leased, self._hits = self._hits, []
        if self._leased:
            return self._lease()
        if self._open:
            self._submit()
        while self._in_flight or self._missing:
            assert self._in_flight or self._slots.prefetching, "no read is under way that could make room"
            self._leased = self._collect()
            if self._leased:
                return self._lease()
            self._submit()  # a failed read has given its slot back, or a prefetch of another expert is over
        self.close()
        if self._failed:
            failed, self._failed = self._failed, []
            raise _read_error(self._slots.layer, failed)
        raise StopIteration

    def close(self) -> None:
        """End every lease; withdraw loads that have not begun, wait for those that have and keep them."""
        if not self._open:
            return
        self._open = False
        self._hits = []
        self._missing.clear()
        self._in_flight = {job for job in self._in_flight if not self._loads.withdraw(job)}
        while self._in_flight:
            self._collect()
        self._loads.on_wait(self._loads.wait_seconds - self._waited_before)
        slots = self._slots
        for expert in self._wanted:
            if expert in slots.slot_of and expert not in slots.pinned:
                slots.policy.insert(expert)

    def _lease(self) -> Lease:
        ids = np.array(self._leased, np.int32)
        return Lease(ids, self._slots.address[ids])

    def _submit(self) -> None:
        """Begin to load missing experts as long as there are slots for them."""
        slots = self._slots
        while self._missing:
            slot = self._take_slot()
            if slot is None:
                return
            expert = self._missing.popleft()
            self._in_flight.add(self._loads.demand(slots, expert, slot))

    def _take_slot(self) -> int | None:
        """A free slot, else that of an expert nobody wants, else that of an expendable one."""
        slots = self._slots
        if slots.free:
            return slots.free.pop()
        victim = slots.policy.victim()
        if victim is not None:
            slots.policy.remove(victim)
        elif self._used:
            victim = self._used.popleft()
        else:
            return None
        return self._loads.evict(slots, victim)

    def _collect(self) -> list[int]:
        """Wait for at least one job, take all that are over, and return the experts that they loaded."""
        return [job.expert for job in self._loads.wait() if self._settle(job)]

    def _settle(self, job: ReadJob) -> bool:
        """Book the end of a job; True if its expert is resident now."""
        slots = self._slots
        self._in_flight.remove(job)
        if not job.read:
            slots.free.append(job.slot)
            self._failed.append(job)
            return False
        slots.insert(job.expert, job.slot)
        begun = job in self._begun
        if not begun:
            self.loads.append((job.expert, slots.expert_bytes))
        self._loads.count(slots, system=begun)
        return True


def _read_error(layer: int, failed: list[ReadJob]) -> ExpertReadError:
    first = failed[0]
    error = first.error
    file, reason = first.reads[0].file, str(error)
    if isinstance(error, OSError):
        reason = error.strerror or os.strerror(error.errno or 0)
        file = Path(error.filename) if error.filename else file
    experts = tuple(job.expert for job in failed)
    wrapped = ExpertReadError(layer, first.expert, file, " ".join(reason.split()), experts)
    wrapped.__cause__ = error
    return wrapped
