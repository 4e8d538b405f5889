"""The expert cache: for each MoE layer a slab of slots, pinned and LRU experts, and leases on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ConfigurationError
from coli_server.experts.eviction import LRU, EvictionPolicy
from coli_server.experts.layout import LayerExperts
from coli_server.experts.loading import CacheCounters, Loads, Observe, unobserved
from coli_server.experts.pool import ReadPool
from coli_server.experts.reader import PreadReader, Reader
from coli_server.experts.slab import Arena, slab_bytes
from coli_server.experts.slots import LayerSlots
from coli_server.experts.stream import ExpertStream, LoadingStream, ResidentStream

DEFAULT_READERS = 4  # reads in flight; two to four keep a disk busy beside running kernels


class ExpertCache:
    """Holds up to `slots_per_layer` experts of each MoE layer in memory and reads the others when wanted.

    One thread, the engine's, makes every call after the constructor. `readers` read threads, started by the
    constructor, only fill slots. `experts_per_token` is the number of slots a layer that pins leave alone.
    `reader` replaces plain preadv(2) and is closed with the cache; `policy` replaces LRU. `on_read` is told
    the seconds of each read, `on_wait` those for which each stream that had to load was blocked.

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
        on_read: Observe = unobserved,
        on_wait: Observe = unobserved,
    ) -> None:
        if not 1 <= experts_per_token <= slots_per_layer:
            raise ConfigurationError(
                f"{slots_per_layer} slots a layer are too few: one token needs {max(1, experts_per_token)}"
            )
        self.slots_per_layer = slots_per_layer
        self.counters = CacheCounters()
        self._floor = experts_per_token
        self._layers: dict[int, LayerSlots] = {}
        counts = [min(slots_per_layer, layer.experts) for layer in layers]
        sizes = [
            slab_bytes(count, layer.layout.slot_bytes) for count, layer in zip(counts, layers, strict=True)
        ]
        staging = staging_bytes(layers, 1)
        arena = Arena([*sizes, *[staging] * readers])
        for index, (layer, count) in enumerate(zip(layers, counts, strict=True)):
            memory = arena.piece(index, count * layer.layout.slot_bytes)
            self._layers[layer.layer] = LayerSlots(layer, memory.reshape(count, -1), policy())
        buffers = [arena.piece(len(layers) + thread, staging) for thread in range(readers)]
        self._pool = ReadPool(PreadReader() if reader is None else reader, buffers)
        self._loads = Loads(self._pool, self._layers, self.counters, on_read, on_wait)
        self._stream: ExpertStream | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the MoE layers."""
        return tuple(self._layers)

    @property
    def pinned(self) -> int:
        """Pinned experts of all layers."""
        return sum(len(slots.pinned) for slots in self._layers.values())

    @property
    def residents(self) -> tuple[int, ...]:
        """Experts in memory, for each of `layers`."""
        return tuple(len(slots.slot_of) for slots in self._layers.values())

    @property
    def bytes(self) -> int:
        """Bytes of the slots that hold an expert."""
        return sum(len(slots.slot_of) * slots.layout.slot_bytes for slots in self._layers.values())

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.memory.nbytes for slots in self._layers.values())

    @property
    def prefetch_in_flight(self) -> int:
        """Prefetched experts that are loading, or loaded and not asked for yet."""
        return sum(len(slots.prefetching) + len(slots.unused) for slots in self._layers.values())

    @property
    def last_loads(self) -> list[tuple[int, int]]:
        """(expert, bytes) of each expert that the latest stream has read so far, in order of completion.

        Complete once that stream has ended or was closed.
        """
        return [] if self._stream is None else self._stream.loads

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
        loaded meanwhile, in waves when more are wanted than there are slots. A lease is valid until the
        iterator advances or closes. An expert that this call still needs is not evicted, so each is read at
        most once. Reads begin before the first lease is taken. A stream left open is closed first.

        Raises ValueError for ids out of range or given twice.
        """
        if self._stream is not None:
            self._stream.close()
        slots = self._layers[layer]
        ids = np.asarray(experts if isinstance(experts, np.ndarray) else list(experts), np.int32)
        wanted: list[int] = ids.tolist()
        distinct = set(wanted)
        resident = len(distinct) == len(wanted) and distinct <= slots.slot_of.keys()
        if not resident and (len(distinct) < len(wanted) or min(wanted) < 0 or max(wanted) >= slots.experts):
            raise ValueError(
                f"layer {layer}: {wanted} are not distinct expert ids from 0 to {slots.experts - 1}"
            )
        late = self._loads.meet(slots, distinct) if slots.prefetching or slots.unused else {}
        if resident:
            self._stream = ResidentStream(slots, wanted, ids)
        else:
            self._stream = LoadingStream(slots, wanted, self._loads, late)
        return self._stream

    def prefetch(self, layer: int, experts: Iterable[int], keep: Container[int] = ()) -> None:
        """Begin to read what is absent of `experts` (distinct ids, the likeliest first), behind all streams.

        They go into free slots, else into those that the eviction policy values least, never into that of
        one of `experts` or `keep`. An open stream of the same layer is closed first. A read that fails is
        counted, and reported when somebody needs the expert.
        """
        if self._stream is not None and self._stream.layer == layer:
            self._stream.close()
        self._loads.prefetch(self._layers[layer], list(experts), keep)

    def poll(self) -> None:
        """Let prefetches that have completed count as resident."""
        self._loads.poll()

    def complete(self, layer: int) -> bool:
        """Whether every expert of the layer is in memory."""
        slots = self._layers[layer]
        return len(slots.slot_of) == slots.experts

    def pin_room(self, layer: int) -> int:
        """How many more experts of the layer may be pinned.

        A layer with a slot for each of its experts needs none for others.
        """
        slots = self._layers[layer]
        return max(0, slots.evictable - (self._floor if len(slots.memory) < slots.experts else 0))

    def slot_bytes(self, layer: int) -> int:
        """Bytes of memory that one expert of the layer takes."""
        return self._layers[layer].layout.slot_bytes

    def pin(self, layer: int, experts: Sequence[int]) -> None:
        """Load what is missing of `experts` and keep them for good.

        Raises ConfigurationError when that would leave the layer fewer than `experts_per_token` slots for the
        others, and ExpertReadError when one cannot be read (the others are pinned).
        """
        slots = self._layers[layer]
        new = [expert for expert in experts if expert not in slots.pinned]
        room = self.pin_room(layer)
        if len(new) > room:
            raise ConfigurationError(
                f"layer {layer}: cannot pin {len(new)} more experts: {len(slots.memory)} slots, "
                f"{len(slots.pinned)} pinned, {self._floor} kept for the others (accepted: 0 to {room})"
            )
        stream = self.stream(layer, new)
        try:
            for _ in stream:
                pass
        finally:
            stream.close()
            self.counters.system_loads += len(stream.loads)
            self.counters.system_load_bytes += sum(nbytes for _, nbytes in stream.loads)
            for expert in new:
                if expert in slots.slot_of:
                    slots.pin(expert)

    def clear(self) -> None:
        """Forget every expert that is not pinned, as if nothing had been read yet; counters go on."""
        if self._stream is not None:
            self._stream.close()
        for slots in self._layers.values():
            self._loads.prefetch(slots, [])  # withdraws those that have not begun
            while slots.prefetching:
                self._loads.wait()
            while (expert := slots.policy.victim()) is not None:
                slots.policy.remove(expert)
                slots.free.append(self._loads.evict(slots, expert))

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
