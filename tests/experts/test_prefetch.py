"""Prefetches: where they go, who goes first, what they are worth, and that no slot or count is lost."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from coli_server.errors import ConfigurationError
from coli_server.experts import CACHED, EVICTION_POLICIES, PINNED, ExpertCache, ExpertReadError
from support.faults import FaultReader

EXPERTS = 8
LAYERS = (1, 3)
EXPERT_BYTES = 360


def use(cache: ExpertCache, layer: int, experts: list[int]) -> None:
    for _ in cache.stream(layer, experts):
        pass


def settle(cache: ExpertCache) -> None:
    """Wait until no prefetch is loading."""
    deadline = time.monotonic() + 30
    while any(slots.prefetching for slots in cache._layers.values()):
        assert time.monotonic() < deadline
        cache.poll()


def order(cache: ExpertCache, layer: int) -> list[int]:
    return list(cache._layers[layer].policy)


def tally(cache: ExpertCache) -> dict[str, int]:
    counters = cache.counters
    names = ("issued", "used", "late", "wasted", "failed")
    found = {name: getattr(counters, f"prefetch_{name}") for name in names}
    return {**found, "in_flight": cache.prefetch_in_flight}


def test_a_completed_prefetch_is_resident_and_a_hit(make_cache):
    cache = make_cache(4)
    cache.prefetch(1, [5, 2])
    settle(cache)
    assert np.flatnonzero(cache.resident(1)).tolist() == [2, 5]
    assert cache.state(1)[5] == CACHED
    stream = cache.stream(1, [5, 2])
    assert next(stream).experts.tolist() == [5, 2]
    assert stream.loads == []
    assert tally(cache) == {"issued": 2, "used": 2, "late": 0, "wasted": 0, "failed": 0, "in_flight": 0}
    assert (cache.counters.system_loads, cache.counters.system_load_bytes) == (2, 2 * EXPERT_BYTES)


def test_a_loading_prefetch_is_not_resident_and_is_late_when_asked_for(make_cache, reader):
    cache = make_cache(4, readers=2)
    reader.gate.clear()
    cache.prefetch(1, [5, 2])  # 5 is begun and held at the gate; 2 waits, as one thread stays free
    while not cache._pool._patient_running:
        time.sleep(0.001)
    stream = cache.stream(1, [2, 5, 0])
    assert not cache.resident(1).any()
    reader.gate.set()
    leased = [expert for lease in stream for expert in lease.experts.tolist()]
    assert sorted(leased) == [0, 2, 5]
    assert sorted(expert for expert, _ in stream.loads) == [0, 2], "5 had begun before it was wanted"
    assert tally(cache)["late"] == 2
    assert (cache.counters.loads, cache.counters.system_loads) == (3, 1)


def test_demand_goes_before_prefetches_that_have_not_begun(make_cache, reader, store):
    cache = make_cache(6, readers=1)
    reader.gate.clear()
    cache.prefetch(1, [7, 6, 5, 4])
    while not cache._pool._patient_running:
        time.sleep(0.001)
    stream = cache.stream(3, [0])
    reader.gate.set()
    assert next(stream).experts.tolist() == [0]
    settle(cache)
    begun = [place[:2] for place in reader.log]
    assert begun.index(store.place(3, 0)) < begun.index(store.place(1, 6))


def test_one_reader_is_kept_free_of_prefetches(make_cache, reader):
    cache = make_cache(8, readers=3)
    reader.gate.clear()
    cache.prefetch(1, list(range(8)))
    while cache._pool._patient_running < 2:
        time.sleep(0.001)
    assert cache._pool._patient_running == 2
    reader.gate.set()
    settle(cache)


def test_a_prefetch_takes_the_least_valuable_slot_and_none_of_the_likely_ones(make_cache):
    cache = make_cache(4)
    use(cache, 1, [0, 1, 2, 3])
    cache.prefetch(1, [4, 0], keep={1})
    settle(cache)
    assert set(np.flatnonzero(cache.resident(1)).tolist()) == {0, 1, 3, 4}
    assert order(cache, 1) == [4, 0, 1, 3], "unused guesses are the first to go"


def test_there_is_no_room_when_everything_is_likely_or_pinned(make_cache):
    cache = make_cache(4)
    cache.pin(1, [0, 1])
    use(cache, 1, [2, 3])
    cache.prefetch(1, [2, 3, 4])
    assert tally(cache)["issued"] == 0
    assert np.flatnonzero(cache.resident(1)).tolist() == [0, 1, 2, 3]


def test_prefetches_that_nobody_asks_for_are_wasted_once_dropped(make_cache):
    cache = make_cache(4)
    cache.prefetch(1, [4, 5])
    settle(cache)
    assert tally(cache)["in_flight"] == 2
    use(cache, 1, [0, 1, 2, 3])
    assert tally(cache) == {"issued": 2, "used": 0, "late": 0, "wasted": 2, "failed": 0, "in_flight": 0}


def test_a_prefetch_not_begun_is_withdrawn_when_the_layer_wants_others(make_cache, reader, store):
    cache = make_cache(4, readers=1)
    reader.gate.clear()
    cache.prefetch(3, [0])  # keeps the only thread
    while not cache._pool._patient_running:
        time.sleep(0.001)
    cache.prefetch(1, [4, 5])
    stream = cache.stream(1, [0, 1, 2, 3])
    assert tally(cache)["wasted"] == 2
    reader.gate.set()
    assert sorted(e for lease in stream for e in lease.experts.tolist()) == [0, 1, 2, 3]
    assert store.place(1, 4) not in [place[:2] for place in reader.log]


def test_a_new_guess_withdraws_the_old_one(make_cache, reader):
    cache = make_cache(2, readers=1)
    reader.gate.clear()
    cache.prefetch(3, [0])
    while not cache._pool._patient_running:
        time.sleep(0.001)
    cache.prefetch(1, [4, 5])
    cache.prefetch(1, [5, 6])
    reader.gate.set()
    settle(cache)
    assert np.flatnonzero(cache.resident(1)).tolist() == [5, 6]
    assert tally(cache)["wasted"] == 1


def test_a_failed_prefetch_gives_its_slot_back_and_the_demand_says_why(make_cache, reader, store):
    cache = make_cache(2)
    reader.fail[store.place(1, 4)] = OSError(errno.EIO, "Input/output error")
    cache.prefetch(1, [4, 5])
    settle(cache)
    assert tally(cache) == {"issued": 2, "used": 0, "late": 0, "wasted": 0, "failed": 1, "in_flight": 1}
    assert cache.counters.load_errors == 1
    with pytest.raises(ExpertReadError, match="layer 1, expert 4"):
        use(cache, 1, [4, 5])
    reader.fail.clear()
    use(cache, 1, [4, 5])
    assert np.flatnonzero(cache.resident(1)).tolist() == [4, 5]


def test_a_wrong_prefetch_that_holds_every_slot_does_not_stop_the_layer(make_cache, reader):
    """Slots of running prefetches are neither free nor evictable: a stream must wait for them."""
    cache = make_cache(2, readers=3)
    reader.gate.clear()
    cache.prefetch(1, [6, 7])
    while cache._pool._patient_running < 2:
        time.sleep(0.001)
    stream = cache.stream(1, [0, 1, 2])
    reader.gate.set()
    assert sorted(e for lease in stream for e in lease.experts.tolist()) == [0, 1, 2]
    found = tally(cache)
    assert found["wasted"] >= 1
    assert found["wasted"] + found["in_flight"] == 2


def test_prefetched_experts_that_hold_every_slot_hand_them_on(make_cache):
    """Wanted prefetches kept their slots to the end, though the stream wanted more than there were slots."""
    cache = make_cache(4)
    cache.pin(3, [0, 4])
    cache.prefetch(3, [1, 5])
    leased = [e for lease in cache.stream(3, [2, 3, 0, 1, 4, 5]) for e in lease.experts.tolist()]
    assert sorted(leased) == [0, 1, 2, 3, 4, 5]


layers = st.sampled_from(LAYERS)
wanted_ids = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS)
some_ids = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=3)


class PrefetchMachine(RuleBasedStateMachine):
    """Prefetches, streams, pins, faults and abandoned streams in any order, at the speed of real threads."""

    def __init__(self, store, slots: int, policy: str) -> None:
        super().__init__()
        self.store = store
        self.reader = FaultReader()
        self.slots = slots
        self.cache = ExpertCache(
            store.layers,
            slots,
            experts_per_token=2,
            readers=2,
            reader=self.reader,
            policy=EVICTION_POLICIES[policy],
        )
        self.pinned: dict[int, set[int]] = {layer: set() for layer in LAYERS}
        self.attributed = 0

    def teardown(self) -> None:
        self.reader.gate.set()
        self.cache.close()

    def busy(self, layer: int, stream) -> set[int]:
        books = self.cache._layers[layer]
        jobs = [*getattr(stream, "_in_flight", ()), *books.prefetching.values()]
        return {job.slot for job in jobs}

    def check(self, layer: int, stream, lease) -> None:
        books = self.cache._layers[layer]
        for expert, address in zip(lease.experts.tolist(), lease.addresses.tolist(), strict=True):
            assert books.slot_of[expert] not in self.busy(layer, stream), "a leased slot is overwritten"
            assert self.store.held(layer, address) == self.store.expected(layer, expert)

    @rule(layer=layers, guess=wanted_ids, keep=some_ids, held=st.booleans())
    def prefetch(self, layer: int, guess: list[int], keep: list[int], held: bool) -> None:
        if held:
            self.reader.gate.clear()
        kept = self.pinned[layer] | {e for e in [*guess, *keep] if self.cache.resident(layer)[e]}
        self.cache.prefetch(layer, guess, keep)
        assert all(self.cache.resident(layer)[sorted(kept)]), "a prefetch took what is likelier"

    @rule()
    def poll(self) -> None:
        self.reader.gate.set()
        settle(self.cache)

    @rule(layer=layers, wanted=wanted_ids, ahead=st.none() | wanted_ids)
    def stream(self, layer: int, wanted: list[int], ahead: list[int] | None) -> None:
        other = next(each for each in LAYERS if each != layer)
        leased = []
        stream = self.cache.stream(layer, wanted)
        if ahead is not None:
            self.cache.prefetch(other, ahead)
        self.reader.gate.set()
        for lease in stream:
            self.check(layer, stream, lease)
            leased += lease.experts.tolist()
        assert sorted(leased) == sorted(wanted), "each wanted expert is leased once"
        self.attributed += len(stream.loads)

    @rule(layer=layers, wanted=wanted_ids, leases=st.integers(0, 3))
    def abandon(self, layer: int, wanted: list[int], leases: int) -> None:
        stream = self.cache.stream(layer, wanted)
        self.reader.gate.set()
        for _, lease in zip(range(leases), stream, strict=False):
            self.check(layer, stream, lease)
        stream.close()
        self.attributed += len(stream.loads)

    @rule(layer=layers, wanted=wanted_ids, broken=some_ids, guess=wanted_ids)
    def fail(self, layer: int, wanted: list[int], broken: list[int], guess: list[int]) -> None:
        self.reader.gate.set()
        settle(self.cache)
        for expert in broken:
            self.reader.fail[self.store.place(layer, expert)] = OSError(errno.EIO, "Input/output error")
        self.cache.prefetch(layer, guess)
        missing = {e for e in wanted if not self.cache.resident(layer)[e]}
        stream = self.cache.stream(layer, wanted)
        leased: list[int] = []
        failed: set[int] = set()
        try:
            for lease in stream:
                self.check(layer, stream, lease)
                leased += lease.experts.tolist()
        except ExpertReadError as error:
            failed = set(error.experts)
        assert failed == missing & set(broken)
        assert sorted(leased) == sorted(set(wanted) - failed)
        settle(self.cache)
        self.reader.fail.clear()
        self.attributed += len(stream.loads)

    @rule(layer=layers, experts=some_ids)
    def pin(self, layer: int, experts: list[int]) -> None:
        self.reader.gate.set()
        try:
            self.cache.pin(layer, experts)
        except ConfigurationError:
            return
        self.pinned[layer] |= set(experts)

    @invariant()
    def no_slot_is_lost_and_bytes_are_the_file_s(self) -> None:
        for layer in LAYERS:
            books = self.cache._layers[layer]
            loading = [job.slot for job in books.prefetching.values()]
            assert sorted([*books.free, *books.slot_of.values(), *loading]) == list(range(self.slots))
            assert books.pinned == self.pinned[layer]
            assert books.unused <= books.slot_of.keys() - books.pinned
            assert sorted([*books.policy, *books.pinned]) == sorted(books.slot_of)
            assert np.flatnonzero(self.cache.state(layer) == PINNED).tolist() == sorted(books.pinned)
            assert np.flatnonzero(self.cache.resident(layer)).tolist() == sorted(books.slot_of)
            for expert in books.slot_of:
                held = self.store.held(layer, int(books.address[expert]))
                assert held == self.store.expected(layer, expert)

    @invariant()
    def counters_add_up(self) -> None:
        found = tally(self.cache)
        assert found.pop("issued") == sum(found.values())
        counters = self.cache.counters
        held = sum(np.count_nonzero(self.cache.resident(layer)) for layer in LAYERS)
        assert counters.loads - counters.evictions == held
        assert counters.loads == counters.system_loads + self.attributed
        assert counters.load_bytes == counters.loads * EXPERT_BYTES


@pytest.mark.parametrize(
    ("slots", "policy"), [(2, "lru"), (4, "lru"), (4, "lfu"), (4, "learned"), (7, "lru")]
)
def test_any_sequence_keeps_the_books(store, slots, policy):
    run_state_machine_as_test(
        lambda: PrefetchMachine(store, slots, policy),
        settings=settings(max_examples=40, stateful_step_count=20, deadline=None),
    )
