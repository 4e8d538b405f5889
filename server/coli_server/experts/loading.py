"""Every read under way: those that a stream waits for, and prefetches that nobody has asked for yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from coli_server.experts.pool import ReadJob, ReadPool
from coli_server.experts.slots import LayerSlots


@dataclass(slots=True)
class CacheCounters:
    """Physical work since the cache was built. No counter ever goes down.

    `loads` and `load_bytes` count experts read completely and their bytes in the files, `system_loads` and
    `system_load_bytes` those among them that no step asked for in time: pins, and prefetches begun before
    they were wanted. `load_seconds` sums the durations of all reads (of parallel reads each);
    `wait_seconds` is how long the caller was blocked.

    prefetch_issued = used + late + wasted + failed + those loading or loaded and not asked for yet.
    """

    loads: int = 0
    load_bytes: int = 0
    system_loads: int = 0
    system_load_bytes: int = 0
    load_errors: int = 0
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    evictions: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_failed: int = 0


Observe = Callable[[float], object]
"""Is told a duration in seconds."""


def unobserved(_: float) -> None:
    """Nobody wants to know."""


class Loads:
    """Begins reads and books their ends. Only the engine thread calls it.

    `on_read` is told how long each read took, `on_wait` how long each stream was blocked that had to load.

    A prefetched expert lies at the cold end of its layer's eviction policy until it is asked for: what was
    really used is worth more than a guess.
    """

    def __init__(
        self,
        pool: ReadPool,
        layers: Mapping[int, LayerSlots],
        counters: CacheCounters,
        on_read: Observe = unobserved,
        on_wait: Observe = unobserved,
    ) -> None:
        self.on_wait = on_wait
        self._on_read = on_read
        self._pool = pool
        self._layers = layers
        self._counters = counters
        self._demanded: list[ReadJob] = []  # over, and not taken by their stream yet

    @property
    def wait_seconds(self) -> float:
        """How long `wait` has blocked so far."""
        return self._counters.wait_seconds

    def demand(self, slots: LayerSlots, expert: int, slot: int) -> ReadJob:
        """Begin to read an expert that a stream waits for."""
        job = self._job(slots, expert, slot)
        self._pool.submit(job)
        return job

    def withdraw(self, job: ReadJob) -> bool:
        """Take back a read that has not begun; its slot is free again. False when it is too late for that."""
        if not self._pool.withdraw(job):
            return False
        self._layers[job.layer].free.append(job.slot)
        return True

    def wait(self) -> list[ReadJob]:
        """Wait until some read is over. The streams' ones; prefetches among them are booked.

        May return none: the one that ended was a prefetch, which can have made room in its layer.
        """
        if not self._demanded:
            start = time.perf_counter()
            job = self._pool.done.get()
            self._counters.wait_seconds += time.perf_counter() - start
            self._book(job)
        self.poll()
        jobs, self._demanded = self._demanded, []
        return jobs

    def poll(self) -> None:
        """Book the reads that are over, without waiting: completed prefetches are resident from here on."""
        done = self._pool.done
        while not done.empty():  # nobody else takes from it
            self._book(done.get_nowait())

    def prefetch(self, slots: LayerSlots, experts: Sequence[int], keep: Container[int] = ()) -> None:
        """Begin to read those of `experts`, the likeliest first, that are absent, as far as there is room.

        Room is a free slot or that of an expert which is neither among `experts` nor in `keep`. Earlier
        prefetches of the layer that are not among `experts` and have not begun are withdrawn.
        """
        self._withdraw_others(slots, experts)
        for expert in experts:
            if expert in slots.slot_of or expert in slots.prefetching:
                continue
            slot = self._room(slots, keep, experts)
            if slot is None:
                return
            job = slots.prefetching[expert] = self._job(slots, expert, slot)
            self._counters.prefetch_issued += 1
            self._pool.submit(job, urgent=False)

    def meet(self, slots: LayerSlots, wanted: Collection[int]) -> dict[ReadJob, bool]:
        """A stream asks for `wanted`: settle what the layer's prefetches were worth.

        Returns those still loading, which the stream now waits for, each with whether it had begun.
        Prefetches of anything else that have not begun are withdrawn.
        """
        used = slots.unused.intersection(wanted)
        slots.unused -= used
        self._counters.prefetch_used += len(used)
        late = {}
        for expert in slots.prefetching.keys() & wanted:
            job = slots.prefetching.pop(expert)
            late[job] = not self._pool.hasten(job)
        self._counters.prefetch_late += len(late)
        self._withdraw_others(slots, wanted)
        return late

    def evict(self, slots: LayerSlots, expert: int) -> int:
        """Give up an expert that its policy does not hold any more; its slot."""
        if expert in slots.unused:
            slots.unused.remove(expert)
            self._counters.prefetch_wasted += 1
        self._counters.evictions += 1
        return slots.evict(expert)

    def count(self, slots: LayerSlots, *, system: bool) -> None:
        """One expert of the layer was read."""
        counters = self._counters
        counters.loads += 1
        counters.load_bytes += slots.expert_bytes
        if system:
            counters.system_loads += 1
            counters.system_load_bytes += slots.expert_bytes

    def _job(self, slots: LayerSlots, expert: int, slot: int) -> ReadJob:
        return ReadJob(slots.layer, expert, slots.memory[slot], slot, slots.layout, slots.reads(expert))

    def _room(self, slots: LayerSlots, *keep: Container[int]) -> int | None:
        if slots.free:
            return slots.free.pop()
        victim = slots.policy.victim(*keep)
        if victim is None:
            return None
        slots.policy.remove(victim)
        return self.evict(slots, victim)

    def _withdraw_others(self, slots: LayerSlots, wanted: Collection[int]) -> None:
        for expert in [expert for expert in slots.prefetching if expert not in wanted]:
            if self.withdraw(slots.prefetching[expert]):
                del slots.prefetching[expert]
                self._counters.prefetch_wasted += 1

    def _book(self, job: ReadJob) -> None:
        counters, slots = self._counters, self._layers[job.layer]
        counters.load_seconds += job.seconds
        self._on_read(job.seconds)
        if job.error is not None:
            counters.load_errors += 1
        if slots.prefetching.get(job.expert) is not job:
            self._demanded.append(job)
            return
        del slots.prefetching[job.expert]
        if job.read:
            slots.insert(job.expert, job.slot)
            slots.policy.offer(job.expert)
            slots.unused.add(job.expert)
            self.count(slots, system=True)
        else:  # a step that needs the expert will read it again, and say so if that fails
            slots.free.append(job.slot)
            counters.prefetch_failed += 1
