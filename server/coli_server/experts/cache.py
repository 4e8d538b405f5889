"""The expert cache: for each MoE layer a slab of slots, pinned and LRU experts, and leases on them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ConfigurationError, ModelError
from coli_server.experts.eviction import LRU, EvictionPolicy
from coli_server.experts.layout import FileRead, LayerExperts, plan_reads
from coli_server.experts.pool import ReadJob, ReadPool
from coli_server.experts.reader import PreadReader, Reader
from coli_server.experts.slab import Arena, slab_bytes

ABSENT, CACHED, PINNED = 0, 1, 2
DEFAULT_READERS = 4  # reads in flight; two to four keep a disk busy beside running kernels


class ExpertReadError(ModelError):
    """Experts of one layer could not be read. `expert`, `file` and the message are those of the first.

    `experts` has every one that failed in the same stream; the others of that stream were leased.
    """

    def __init__(self, layer: int, expert: int, file: Path, reason: str, experts: tuple[int, ...]) -> None:
        super().__init__(f"layer {layer}, expert {expert}: cannot read {file}: {reason}")
        self.layer = layer
        self.expert = expert
        self.file = file
        self.experts = experts


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
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


class _Layer:
    """One layer's slots. An expert is absent, loading (slot taken, state 0), cached or pinned."""

    def __init__(
        self, experts: LayerExperts, slots: int, arena: Arena, index: int, policy: EvictionPolicy
    ) -> None:
        self.layer = experts.layer
        self.layout = experts.layout
        self.sources = experts.sources
        self.experts = experts.experts
        self.expert_bytes = experts.expert_bytes()
        self.slots = slots
        slot_bytes = experts.layout.slot_bytes
        self.memory = arena.piece(index, slots * slot_bytes).reshape(slots, slot_bytes)
        self.base = arena.address + arena.offsets[index]
        self.state = np.zeros(self.experts, np.uint8)
        self.resident = np.zeros(self.experts, np.bool_)
        self.address = np.zeros(self.experts, np.int64)
        self.slot_of: dict[int, int] = {}  # cached and pinned experts
        self.pinned: set[int] = set()
        self.free = list(range(slots - 1, -1, -1))
        self.policy = policy
        self._reads: dict[int, tuple[FileRead, ...]] = {}

    def reads(self, expert: int) -> tuple[FileRead, ...]:
        plan = self._reads.get(expert)
        if plan is None:
            plan = self._reads[expert] = plan_reads(self.layout, self.sources[expert])
        return plan

    def settle(self, expert: int, slot: int) -> None:
        """A load ended well: the expert is resident. Making it evictable is the stream's business."""
        self.slot_of[expert] = slot
        self.state[expert] = CACHED
        self.resident[expert] = True
        self.address[expert] = self.base + slot * self.layout.slot_bytes

    def evict(self, expert: int) -> int:
        """The expert, which must not be in the policy any more, is absent; its slot."""
        self.state[expert] = ABSENT
        self.resident[expert] = False
        self.address[expert] = 0
        return self.slot_of.pop(expert)


class ExpertStream:
    """Iterates over leases that together hold every wanted expert once. Made by `ExpertCache.stream`.

    A context manager: leaving it, like `close`, gives everything back. So does the end of the iteration,
    and so does the cache's next `stream`, should a caller have dropped this one half-way.
    """

    def __init__(self, cache: ExpertCache, layer: _Layer, wanted: list[int]) -> None:
        self._cache = cache
        self._layer = layer
        self._wanted = wanted
        self._loads: list[tuple[int, int]] = []
        self._in_flight: set[ReadJob] = set()
        self._done: SimpleQueue[ReadJob] = SimpleQueue()
        self._leased: list[int] = []
        self._used: deque[int] = deque()  # leased before and given back: evictable if all else is needed
        self._failed: list[ReadJob] = []
        self._open = True
        ids = np.array(wanted, np.int32)
        resident = layer.resident[ids]
        self._hits = ids if resident.all() else ids[resident]
        self._missing = deque(() if self._hits is ids else ids[~resident].tolist())
        self._fetches = bool(self._missing)
        if self._fetches:
            self._protect()
            self._submit()
        else:
            self._touch()

    def __iter__(self) -> ExpertStream:
        return self

    def __next__(self) -> Lease:
        """The next lease; the one before it ends. Blocks until an expert is loaded where none is.

        Raises ExpertReadError, after everything else was leased, when experts could not be read.
        """
        if self._hits.size:
            hits, self._hits = self._hits, self._hits[:0]
            if self._fetches:
                self._leased = hits.tolist()
            return Lease(hits, self._layer.address[hits])
        if self._fetches and self._open:
            self._used.extend(self._leased)
            self._leased = []
            self._submit()
            while self._in_flight:
                loaded = self._collect()
                if loaded:
                    self._leased = loaded
                    ids = np.array(loaded, np.int32)
                    return Lease(ids, self._layer.address[ids])
                self._submit()
        self.close()
        if self._failed:
            failed, self._failed = self._failed, []
            raise _read_error(self._layer, failed)
        raise StopIteration

    def __enter__(self) -> ExpertStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every lease; cancel loads that have not begun, wait for those that have and keep them."""
        if not self._open:
            return
        self._open = False
        self._hits = self._hits[:0]
        if not self._fetches:
            return
        for job in self._in_flight:
            job.cancelled = True
        while self._in_flight:
            self._collect()
        layer = self._layer
        for expert in self._wanted:
            if expert in layer.slot_of and expert not in layer.pinned:
                layer.policy.insert(expert)

    def _touch(self) -> None:
        """Everything is resident and nothing will be evicted: only the order of use changes."""
        policy, pinned = self._layer.policy, self._layer.pinned
        for expert in self._wanted:
            if expert not in pinned:
                policy.touch(expert)

    def _protect(self) -> None:
        """Take the wanted experts from the policy, so that no load of this stream evicts them unused."""
        layer = self._layer
        for expert in self._hits.tolist():
            if expert not in layer.pinned:
                layer.policy.remove(expert)

    def _submit(self) -> None:
        """Begin to load missing experts as long as there are slots for them."""
        layer, cache = self._layer, self._cache
        while self._missing:
            slot = self._take_slot()
            if slot is None:
                return
            expert = self._missing.popleft()
            job = ReadJob(expert, slot, layer.memory[slot], layer.layout, layer.reads(expert), self._done)
            self._in_flight.add(job)
            cache._pool.submit(job)

    def _take_slot(self) -> int | None:
        """A free slot, else that of an expert nobody wants, else that of one this stream is done with."""
        layer = self._layer
        if layer.free:
            return layer.free.pop()
        victim = layer.policy.victim()
        if victim is not None:
            layer.policy.remove(victim)
        else:
            while self._used and victim is None:
                expert = self._used.popleft()
                victim = None if expert in layer.pinned else expert
            if victim is None:
                return None
        self._cache.counters.evictions += 1
        return layer.evict(victim)

    def _collect(self) -> list[int]:
        """Wait for at least one job, take every one that is over, and return the experts that they loaded."""
        counters = self._cache.counters
        start = time.perf_counter()
        jobs = [self._done.get()]
        counters.wait_seconds += time.perf_counter() - start
        try:
            while True:
                jobs.append(self._done.get_nowait())
        except Empty:
            pass
        loaded = []
        for job in jobs:
            self._in_flight.remove(job)
            counters.load_seconds += job.seconds
            if job.read:
                self._layer.settle(job.expert, job.slot)
                self._loads.append((job.expert, self._layer.expert_bytes))
                counters.loads += 1
                counters.load_bytes += self._layer.expert_bytes
                loaded.append(job.expert)
            else:
                self._layer.free.append(job.slot)
                if job.error is not None:
                    counters.load_errors += 1
                    self._failed.append(job)
        return loaded


class ExpertCache:
    """Holds up to `slots_per_layer` experts of each MoE layer in memory and reads the others when wanted.

    One thread, the engine's, makes every call, after the constructor. `readers` read threads, started by the
    constructor, only fill slots. `experts_per_token` is the number of slots a layer that pins leave alone.
    `reader` replaces plain preadv(2), and `policy` LRU; both are closed or dropped with the cache.

    Raises ConfigurationError when there are fewer slots than `experts_per_token` or not enough memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        slots_per_layer: int,
        *,
        experts_per_token: int = 1,
        readers: int = DEFAULT_READERS,
        reader: Reader | None = None,
        policy: Callable[[], EvictionPolicy] = LRU,
    ) -> None:
        if slots_per_layer < experts_per_token:
            raise ConfigurationError(
                f"{slots_per_layer} slots a layer are too few: one token needs {experts_per_token}"
            )
        self.slots_per_layer = slots_per_layer
        self.counters = CacheCounters()
        self._floor = experts_per_token
        slots = [min(slots_per_layer, layer.experts) for layer in layers]
        staging = max((layer.layout.staging_bytes for layer in layers), default=0)
        sizes = [
            slab_bytes(count, layer.layout.slot_bytes) for count, layer in zip(slots, layers, strict=True)
        ]
        arena = Arena([*sizes, *[staging] * readers])
        self._layers = {
            experts.layer: _Layer(experts, count, arena, index, policy())
            for index, (experts, count) in enumerate(zip(layers, slots, strict=True))
        }
        buffers = [arena.piece(len(layers) + thread, staging) for thread in range(readers)]
        self._pool = ReadPool(PreadReader() if reader is None else reader, buffers)
        self._stream: ExpertStream | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the MoE layers."""
        return tuple(self._layers)

    @property
    def pinned(self) -> int:
        """Pinned experts of all layers."""
        return sum(len(layer.pinned) for layer in self._layers.values())

    @property
    def bytes(self) -> int:
        """Bytes of the slots that hold an expert."""
        return sum(len(layer.slot_of) * layer.layout.slot_bytes for layer in self._layers.values())

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.memory.nbytes for layer in self._layers.values())

    @property
    def last_loads(self) -> list[tuple[int, int]]:
        """(expert, bytes) of each expert that the latest stream has read so far, in order of completion."""
        return [] if self._stream is None else self._stream._loads

    def state(self, layer: int) -> NDArray[np.uint8]:
        """uint8 [experts]: 0 absent or loading, 1 cached, 2 pinned. Not a copy.

        The array changes in place whenever a stream of this layer evicts or loads. Who needs the residency
        from before a step must read it before `stream`, or copy it. Never write to it.
        """
        return self._layers[layer].state

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """bool [experts]: cached or pinned. Not a copy; the rules of `state` hold."""
        return self._layers[layer].resident

    def stream(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> ExpertStream:
        """Lease every one of `experts` (distinct ids in the order in which they count as used).

        The first lease has all that are resident, while the missing ones load; the next ones have what was
        loaded meanwhile, in waves when there are more wanted than slots. A lease is valid until the
        iterator advances or closes. An expert that this call still needs is not evicted, so each is read at
        most once. Reads begin before the first lease is taken. A stream left open is closed first.

        Raises ValueError for ids out of range or given twice.
        """
        if self._stream is not None:
            self._stream.close()
        target = self._layers[layer]
        wanted: list[int] = experts.tolist() if isinstance(experts, np.ndarray) else list(experts)
        if wanted and (min(wanted) < 0 or max(wanted) >= target.experts or len(set(wanted)) < len(wanted)):
            raise ValueError(
                f"layer {layer}: {wanted} are not distinct expert ids from 0 to {target.experts - 1}"
            )
        self._stream = ExpertStream(self, target, wanted)
        return self._stream

    def pin(self, layer: int, experts: Sequence[int]) -> None:
        """Load what is missing of `experts` and keep them for good.

        Raises ConfigurationError when that would leave the layer fewer than `experts_per_token` slots for the
        others, and ExpertReadError when one cannot be read (the others are pinned).
        """
        target = self._layers[layer]
        new = [expert for expert in experts if expert not in target.pinned]
        room = target.slots - len(target.pinned) - (self._floor if target.slots < target.experts else 0)
        if len(new) > room:
            raise ConfigurationError(
                f"layer {layer}: cannot pin {len(new)} more experts: {target.slots} slots, "
                f"{len(target.pinned)} pinned, {self._floor} kept free (accepted: 0 to {max(room, 0)})"
            )
        stream = self.stream(layer, new)
        try:
            for _ in stream:
                pass
        finally:
            stream.close()
            for expert in new:
                if expert in target.slot_of:
                    target.policy.remove(expert)
                    target.pinned.add(expert)
                    target.state[expert] = PINNED

    def close(self) -> None:
        """End the read threads and free the slots. Addresses handed out are invalid from here on."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._pool.close()
        self._layers.clear()


def staging_bytes(layers: Sequence[LayerExperts], readers: int = DEFAULT_READERS) -> int:
    """Bytes that a cache of these layers needs beside its slots, for a memory budget."""
    return readers * max((layer.layout.staging_bytes for layer in layers), default=0)


def _read_error(layer: _Layer, failed: list[ReadJob]) -> ExpertReadError:
    first = failed[0]
    error = first.error
    reason, file = str(error), first.reads[0].file if first.reads else Path()
    if isinstance(error, OSError):
        reason = error.strerror or os.strerror(error.errno or 0)
        file = Path(error.filename) if error.filename else file
    experts = tuple(job.expert for job in failed)
    wrapped = ExpertReadError(layer.layer, first.expert, file, " ".join(reason.split()), experts)
    wrapped.__cause__ = error
    return wrapped
