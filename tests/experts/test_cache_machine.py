"""Random sequences of streams, pins, failures and abandoned streams against a naive model of the cache."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from coli_server.errors import ConfigurationError
from coli_server.experts import CACHED, PINNED, ExpertCache, ExpertReadError

EXPERTS = 8
LAYERS = (1, 3)
FLOOR = 2

layers = st.sampled_from(LAYERS)
wanted_ids = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS)
some_ids = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=3)


class Model:
    """One layer as lists: `order` is the LRU order, oldest first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.pinned: set[int] = set()

    def evicted(self, wanted: list[int], slots: int) -> list[int]:
        """What a stream without faults gives up: the oldest unwanted, then its own first ones."""
        missing = [e for e in wanted if e not in self.order and e not in self.pinned]
        hits = [e for e in wanted if e in self.order]
        others = [e for e in self.order if e not in wanted]
        room = slots - len(self.pinned)
        excess = max(0, len(self.order) + len(missing) - room)
        return (others + hits + missing)[:excess]

    def use(self, wanted: list[int], slots: int) -> None:
        gone = self.evicted(wanted, slots)
        used = [e for e in wanted if e not in self.pinned and e not in gone]
        self.order = [e for e in self.order if e not in wanted and e not in gone] + used


class CacheMachine(RuleBasedStateMachine):
    def __init__(self, store, reader, slots: int) -> None:
        super().__init__()
        self.store = store
        self.reader = reader
        self.cache = ExpertCache(store.layers, slots, experts_per_token=FLOOR, readers=2, reader=reader)
        self.slots = slots
        self.models = {layer: Model() for layer in LAYERS}
        self.loads = 0

    def teardown(self) -> None:
        self.cache.close()

    def resident(self, layer: int) -> set[int]:
        return set(np.flatnonzero(self.cache.state(layer)).tolist())

    def check_lease(self, layer: int, stream, lease) -> None:
        books = self.cache._layers[layer]
        busy = {job.slot for job in getattr(stream, "_in_flight", ())}
        for expert, address in zip(lease.experts.tolist(), lease.addresses.tolist(), strict=True):
            assert books.slot_of[expert] not in busy, "a leased slot is being overwritten"
            assert self.store.held(layer, address) == self.store.expected(layer, expert)

    def read_log(self, since: int) -> int:
        """Reads since then; checks that no expert was read twice."""
        log = self.reader.log[since:]
        assert len(log) == len(set(log)), "an expert was read twice by one stream"
        return len(log)

    def resynchronise(self, layer: int, wanted: list[int]) -> None:
        """After a fault the model takes over what remains, as far as timing may decide it."""
        model, books = self.models[layer], self.cache._layers[layer]
        real = list(books.policy)
        others = [e for e in model.order if e not in wanted]
        survivors = [e for e in real if e not in wanted]
        assert survivors == others[len(others) - len(survivors) :], "the unwanted go oldest first"
        assert real == survivors + [e for e in wanted if e in real], "the wanted are the latest, in order"
        if len(set(wanted) | model.pinned) <= self.slots:
            assert {e for e in wanted if e in model.order} <= set(real), "a wanted expert was evicted"
        model.order = real

    @rule(layer=layers, wanted=wanted_ids)
    def stream(self, layer: int, wanted: list[int]) -> None:
        before, since, hits = self.cache.counters.loads, len(self.reader.log), self.resident(layer)
        leased = []
        for number, lease in enumerate(stream := self.cache.stream(layer, wanted)):
            self.check_lease(layer, stream, lease)
            if number == 0 and hits & set(wanted):
                assert lease.experts.tolist() == [e for e in wanted if e in hits]
            leased += lease.experts.tolist()
            self.check_lease(layer, stream, lease)
        assert sorted(leased) == sorted(wanted), "each wanted expert is leased once"
        missing = [e for e in wanted if e not in hits]
        assert self.cache.counters.loads - before == len(missing)
        assert self.read_log(since) == 2 * len(missing)
        assert sorted(e for e, _ in self.cache.last_loads) == sorted(missing)
        self.models[layer].use(wanted, self.slots)
        assert list(self.cache._layers[layer].policy) == self.models[layer].order

    @rule(layer=layers, wanted=wanted_ids, leases=st.integers(0, 3), closed=st.booleans())
    def abandon(self, layer: int, wanted: list[int], leases: int, closed: bool) -> None:
        since = len(self.reader.log)
        stream = self.cache.stream(layer, wanted)
        for _, lease in zip(range(leases), stream, strict=False):
            self.check_lease(layer, stream, lease)
        if closed:
            stream.close()
        else:
            self.cache.stream(layer, [])
        self.read_log(since)
        assert list(stream) == []
        self.resynchronise(layer, wanted)

    @rule(layer=layers, wanted=wanted_ids, broken=some_ids)
    def fail(self, layer: int, wanted: list[int], broken: list[int]) -> None:
        since, hits = len(self.reader.log), self.resident(layer)
        failing = {e for e in wanted if e in broken and e not in hits}
        for expert in broken:
            self.reader.fail[self.store.place(layer, expert)] = OSError(errno.EIO, "Input/output error")
        leased: list[int] = []

        def run() -> None:
            for lease in (stream := self.cache.stream(layer, wanted)):
                self.check_lease(layer, stream, lease)
                leased.extend(lease.experts.tolist())

        if failing:
            with pytest.raises(ExpertReadError) as caught:
                run()
            assert (caught.value.layer, set(caught.value.experts)) == (layer, failing)
        else:
            run()
        self.reader.fail.clear()
        assert sorted(leased) == sorted(set(wanted) - failing)
        self.read_log(since)
        self.resynchronise(layer, wanted)

    @rule(layer=layers, experts=some_ids)
    def pin(self, layer: int, experts: list[int]) -> None:
        model = self.models[layer]
        new = [e for e in experts if e not in model.pinned]
        floor = FLOOR if self.slots < EXPERTS else 0
        if len(model.pinned) + len(new) + floor > self.slots:
            with pytest.raises(ConfigurationError):
                self.cache.pin(layer, experts)
            return
        model.use(new, self.slots)
        model.order = [e for e in model.order if e not in new]
        model.pinned |= set(new)
        self.cache.pin(layer, experts)

    @invariant()
    def books_agree(self) -> None:
        for layer in LAYERS:
            books, model = self.cache._layers[layer], self.models[layer]
            count = min(self.slots, EXPERTS)
            assert sorted([*books.free, *books.slot_of.values()]) == list(range(count)), "a slot is lost"
            assert list(books.policy) == model.order
            assert books.pinned == model.pinned
            expected = np.zeros(EXPERTS, np.uint8)
            expected[model.order] = CACHED
            expected[sorted(model.pinned)] = PINNED
            assert self.cache.state(layer).tolist() == expected.tolist()
            assert self.cache.resident(layer).tolist() == (expected > 0).tolist()
            for expert, slot in books.slot_of.items():
                address = books.memory[slot].ctypes.data
                assert books.address[expert] == address
                assert self.store.held(layer, address) == self.store.expected(layer, expert)

    @invariant()
    def counters_add_up(self) -> None:
        counters = self.cache.counters
        held = sum(len(self.resident(layer)) for layer in LAYERS)
        assert counters.loads - counters.evictions == held
        assert counters.load_bytes == counters.loads * 360
        assert counters.loads >= self.loads
        self.loads = counters.loads
        assert self.cache.pinned == sum(len(model.pinned) for model in self.models.values())


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_cache_against_a_naive_model(store, reader, slots):
    def machine() -> CacheMachine:
        reader.closed = False
        reader.log.clear()
        return CacheMachine(store, reader, slots)

    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )
