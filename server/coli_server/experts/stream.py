"""Streams of leases: what one step wants of one layer, resident experts first, loaded ones as they come."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError
from coli_server.experts.pool import ReadJob, ReadPool
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


@dataclass(slots=True)
class CacheCounters:
    """Physical work since the cache was built. No counter ever goes down.

    `loads` and `load_bytes` count experts read completely and their bytes in the files; `load_seconds` sums
    the durations of all reads (of parallel reads each); `wait_seconds` is how long the caller was blocked.
    """

    loads: int = 0
    load_bytes: int = 0
    load_errors: int = 0
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    evictions: int = 0


class ExpertStream(Iterator[Lease], AbstractContextManager["ExpertStream"]):
    """Iterates over leases that together hold every wanted expert once.

    `loads` has (expert, bytes in the files) of each expert read so far, in order of completion. Leaving the
    context, like `close`, gives everything back; so does the end of the iteration.
    """

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []

    def close(self) -> None:
        """End every lease. May be called at any time and more than once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ResidentStream(ExpertStream):
    """Everything is resident: one lease, and nothing to give back, as nothing else loads meanwhile."""

    def __init__(self, slots: LayerSlots, wanted: list[int]) -> None:
        super().__init__()
        ids = np.array(wanted, np.int32)
        self._lease: Lease | None = Lease(ids, slots.address[ids]) if wanted else None
        touch, pinned = slots.policy.touch, slots.pinned
        for expert in wanted:
            if expert not in pinned:
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
    are the first of (resident, then missing) that do not fit: which experts remain at the end does not
    depend on which read was the fastest. The policy gets the survivors back in the order of `wanted`.
    """

    def __init__(self, slots: LayerSlots, wanted: list[int], pool: ReadPool, counters: CacheCounters) -> None:
        super().__init__()
        self._slots = slots
        self._wanted = wanted
        self._pool = pool
        self._counters = counters
        self._done: SimpleQueue[ReadJob] = SimpleQueue()
        self._in_flight: set[ReadJob] = set()
        self._failed: list[ReadJob] = []
        self._open = True
        self._hits = [expert for expert in wanted if expert in slots.slot_of]
        self._missing = deque(expert for expert in wanted if expert not in slots.slot_of)
        self._leased: list[int] = []
        self._used: deque[int] = deque()  # expendable, and not needed any more
        protected = [expert for expert in self._hits if expert not in slots.pinned]
        order = [*protected, *self._missing]
        self._expendable = set(order[: max(0, len(order) - slots.evictable)])
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
        while self._in_flight:
            self._leased = self._collect()
            if self._leased:
                return self._lease()
            self._submit()  # a failed read has given its slot back
        self.close()
        if self._failed:
            failed, self._failed = self._failed, []
            raise _read_error(self._slots.layer, failed)
        raise StopIteration

    def close(self) -> None:
        """End every lease; cancel loads that have not begun, wait for those that have and keep them."""
        if not self._open:
            return
        self._open = False
        self._hits = []
        for job in self._in_flight:
            job.cancelled = True
        while self._in_flight:
            self._collect()
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
            job = ReadJob(expert, slots.memory[slot], slot, slots.layout, slots.reads(expert), self._done)
            self._in_flight.add(job)
            self._pool.submit(job)

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
        self._counters.evictions += 1
        return slots.evict(victim)

    def _collect(self) -> list[int]:
        """Wait for at least one job, take all that are over, and return the experts that they loaded."""
        start = time.perf_counter()
        jobs = [self._done.get()]
        self._counters.wait_seconds += time.perf_counter() - start
        try:
            while True:
                jobs.append(self._done.get_nowait())
        except Empty:
            pass
        return [job.expert for job in jobs if self._settle(job)]

    def _settle(self, job: ReadJob) -> bool:
        """Book the end of a job; True if its expert is resident now."""
        slots, counters = self._slots, self._counters
        self._in_flight.remove(job)
        counters.load_seconds += job.seconds
        if not job.read:
            slots.free.append(job.slot)
            if job.error is not None:
                counters.load_errors += 1
                self._failed.append(job)
            return False
        slots.insert(job.expert, job.slot)
        self.loads.append((job.expert, slots.expert_bytes))
        counters.loads += 1
        counters.load_bytes += slots.expert_bytes
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
