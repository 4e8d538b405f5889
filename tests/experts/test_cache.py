"""Scenarios of the expert cache: order, waves, pins, faults, and what is counted."""

from __future__ import annotations

import errno
import os
import threading
from itertools import chain

import numpy as np
import pytest

from coli_server.errors import ConfigurationError
from coli_server.experts import ExpertCache, ExpertReadError, PreadReader


def lease_all(cache, store, layer, wanted):
    """Run a whole stream, compare every leased slot with the files, and return the leases' ids."""
    leases = []
    for lease in cache.stream(layer, wanted):
        assert lease.experts.dtype == np.int32
        assert lease.addresses.dtype == np.int64
        leases.append(lease.experts.tolist())
        for expert, address in zip(lease.experts.tolist(), lease.addresses.tolist(), strict=True):
            assert address % 64 == 0
            assert store.held(layer, address) == store.expected(layer, expert)
    assert sorted(chain.from_iterable(leases)) == sorted(wanted)
    return leases


def residents(cache, layer):
    return set(np.flatnonzero(cache.state(layer)).tolist())


def test_first_lease_has_all_residents_while_the_missing_ones_load(store, reader, make_cache):
    cache = make_cache(6)
    lease_all(cache, store, 1, [0, 1, 2])
    reader.gate.clear()
    with cache.stream(1, [5, 2, 4, 0]) as stream:
        assert next(stream).experts.tolist() == [2, 0]
        assert cache.state(1).tolist() == [1, 1, 1, 0, 0, 0, 0, 0], "a slot being loaded is not resident"
        reader.gate.set()
        assert sorted(chain.from_iterable(lease.experts.tolist() for lease in stream)) == [4, 5]
    assert residents(cache, 1) == {0, 1, 2, 4, 5}


def test_all_resident_is_one_lease_and_reads_nothing(store, reader, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 1, [3, 1, 2])
    reads = len(reader.log)
    assert lease_all(cache, store, 1, [1, 3]) == [[1, 3]]
    assert len(reader.log) == reads
    assert cache.last_loads == []


def test_nothing_wanted_gives_no_lease(store, make_cache):
    assert lease_all(make_cache(4), store, 1, []) == []


def test_the_least_recently_used_expert_goes_first(store, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 1, [0, 1, 2, 3])
    lease_all(cache, store, 1, [0])
    lease_all(cache, store, 1, [4])
    assert residents(cache, 1) == {0, 2, 3, 4}
    lease_all(cache, store, 1, [5, 2])
    assert residents(cache, 1) == {0, 2, 4, 5}


def test_touch_order_is_the_order_given_not_the_order_of_ids_or_reads(store, make_cache):
    cache = make_cache(3)
    lease_all(cache, store, 1, [2, 0, 1])
    for newcomer, gone in ((3, 2), (4, 0), (5, 1)):
        lease_all(cache, store, 1, [newcomer])
        assert gone not in residents(cache, 1)


def test_an_expert_still_needed_by_the_step_is_not_evicted(store, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 1, [0, 1, 2, 3])
    loads = cache.counters.loads
    lease_all(cache, store, 1, [4, 5, 0, 1])  # 0 and 1 are the oldest, and wanted
    assert residents(cache, 1) == {0, 1, 4, 5}
    assert cache.counters.loads - loads == 2


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 8, 20])
def test_more_wanted_than_slots_comes_in_waves_with_one_read_each(store, make_cache, slots):
    cache = make_cache(slots)
    for wanted in ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]):
        before, held = cache.counters.loads, residents(cache, 1)
        for lease in lease_all(cache, store, 1, wanted):
            assert len(lease) <= slots
        assert cache.counters.loads - before == 8 - len(held)
        assert len(residents(cache, 1)) == min(slots, 8)


def test_what_survives_a_wave_does_not_depend_on_the_speed_of_reads(store, make_cache):
    kept = set()
    for _ in range(20):
        cache = make_cache(3)
        lease_all(cache, store, 1, [7, 0, 6, 1, 5, 2, 4, 3])
        kept.add(frozenset(residents(cache, 1)))
    assert kept == {frozenset({2, 4, 3})}


def test_a_leased_slot_is_not_written_while_others_load(store, make_cache):
    cache = make_cache(2)
    lease_all(cache, store, 1, [0, 1])
    with cache.stream(1, [0, 1, 2, 3, 4]) as stream:
        for lease in stream:
            slots = {cache._layers[1].slot_of[expert] for expert in lease.experts.tolist()}
            assert slots.isdisjoint(job.slot for job in stream._in_flight)


def test_layers_are_apart(store, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 1, [0, 1])
    lease_all(cache, store, 3, [1, 2])
    assert cache.layers == (1, 3)
    assert (residents(cache, 1), residents(cache, 3)) == ({0, 1}, {1, 2})


def test_counters_count_reads_and_bytes_of_the_files(store, reader, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 1, [0, 1, 2, 3])
    lease_all(cache, store, 1, [4, 0])
    expert_bytes = 3 * 120
    assert (cache.counters.loads, cache.counters.load_bytes) == (5, 5 * expert_bytes)
    assert cache.counters.evictions == 1
    assert cache.last_loads == [(4, expert_bytes)]
    assert sum(size for _, _, size in reader.log) == 5 * expert_bytes, "exactly the experts' bytes are read"
    assert len(reader.log) == 2 * 5, "gate and up are neighbours: one read; down lies elsewhere"
    assert cache.counters.load_seconds > 0
    assert cache.counters.wait_seconds > 0
    slot = store.layers[0].layout.slot_bytes
    assert (cache.bytes, cache.capacity_bytes) == (4 * slot, 2 * 4 * slot)


def test_state_and_resident_change_in_place(store, make_cache):
    cache = make_cache(2)
    state, resident = cache.state(1), cache.resident(1)
    lease_all(cache, store, 1, [6, 2])
    assert state.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert resident.tolist() == [False, False, True, False, False, False, True, False]
    cache.pin(1, [2])
    lease_all(cache, store, 1, [0])
    assert state.tolist() == [1, 0, 2, 0, 0, 0, 0, 0]
    assert resident.tolist() == [True, False, True, False, False, False, False, False]


def test_pinned_experts_are_never_evicted(store, make_cache):
    cache = make_cache(4, experts_per_token=2)
    cache.pin(1, [5, 6])
    assert cache.pinned == 2
    for _ in range(3):
        lease_all(cache, store, 1, [0, 1, 2, 3, 4, 5, 6, 7])
    assert {5, 6} <= residents(cache, 1)
    assert cache.state(1)[[5, 6]].tolist() == [2, 2]
    assert cache.counters.loads == 2 + 3 * 6 - 2 * 2, "two of the others are still there each time"


def test_pins_leave_the_slots_that_a_token_needs(make_cache):
    cache = make_cache(5, experts_per_token=3)
    cache.pin(1, [0, 1])
    with pytest.raises(
        ConfigurationError, match=r"layer 1: cannot pin 1 more .* 3 kept for the others .* 0 to 0"
    ):
        cache.pin(1, [1, 2])
    assert cache.pinned == 2


def test_every_expert_may_be_pinned_when_all_have_slots(store, make_cache):
    cache = make_cache(8, experts_per_token=3)
    cache.pin(1, range(8))
    assert cache.pinned == 8
    assert lease_all(cache, store, 1, [3, 1]) == [[3, 1]]


@pytest.mark.parametrize("wanted", [[-1], [8], [0, -1], [1, 1], [0, 1, 2, 0]])
def test_an_id_out_of_range_or_given_twice_is_refused(store, make_cache, wanted):
    cache = make_cache(4)
    lease_all(cache, store, 1, [0, 1, 2])
    with pytest.raises(ValueError, match="distinct expert ids from 0 to 7"):
        cache.stream(1, wanted)
    lease_all(cache, store, 1, [5, 0, 1])


def test_a_capacity_under_the_experts_of_a_token_is_refused(store):
    with pytest.raises(ConfigurationError, match="3 slots a layer are too few: one token needs 4"):
        ExpertCache(store.layers, 3, experts_per_token=4)


def test_a_failed_read_names_layer_expert_and_file_and_gives_the_slot_back(store, reader, make_cache):
    cache = make_cache(4)
    lease_all(cache, store, 3, [0, 1, 2, 3])
    reader.fail[store.place(3, 5)] = OSError(errno.EIO, "Input/output error")
    stream, leased = cache.stream(3, [4, 5, 6]), []
    with pytest.raises(ExpertReadError) as caught:
        leased.extend(lease.experts.tolist() for lease in stream)
    assert sorted(chain.from_iterable(leased)) == [4, 6], "the others are leased before the error"
    assert str(caught.value) == (
        f"layer 3, expert 5: cannot read {store.folder / 'layer3.safetensors'}: Input/output error"
    )
    assert (caught.value.code, caught.value.layer, caught.value.experts) == ("MODEL", 3, (5,))
    assert len(cache._layers[3].free) == 1
    assert cache.counters.load_errors == 1
    reader.fail.clear()
    lease_all(cache, store, 3, [4, 5, 6])
    assert cache._layers[3].free == []


def test_every_failed_expert_is_named_once(store, reader, make_cache):
    cache = make_cache(2)
    for expert in (1, 4, 6):
        reader.fail[store.place(1, expert)] = OSError(errno.EIO, "Input/output error")
    stream = cache.stream(1, range(8))
    with pytest.raises(ExpertReadError) as caught:
        list(stream)
    assert set(caught.value.experts) == {1, 4, 6}
    assert list(stream) == []
    assert len(residents(cache, 1)) + len(cache._layers[1].free) == 2


def test_short_reads_are_continued(store, reader, make_cache):
    cache = make_cache(4)
    reader.longest = 7
    lease_all(cache, store, 1, [0, 1, 2, 3])
    assert len(reader.log) > 4 * 360 // 7


def test_a_file_truncated_under_a_live_cache_fails_only_the_experts_behind_its_end(store, make_cache):
    cache = make_cache(2)
    lease_all(cache, store, 1, [0, 7])
    file = store.folder / "layer1.safetensors"
    os.truncate(file, store.place(1, 6)[1] + 10)
    with pytest.raises(ExpertReadError, match=r"layer 1, expert 6: .*layer1\.safetensors: the file ends"):
        list(cache.stream(1, [0, 6]))
    for lease in cache.stream(1, [2, 3]):
        assert lease.experts.size
    assert residents(cache, 1) == {2, 3}
    with pytest.raises(ExpertReadError, match="expert 7"):
        list(cache.stream(1, [7]))


def test_a_file_exchanged_between_two_uses_is_refused_once_it_is_reopened(store):
    cache = ExpertCache(store.layers, 2, reader=PreadReader(max_open=0))
    try:
        list(cache.stream(1, [0]))
        file = store.folder / "layer1.safetensors"
        other = store.folder / "other"
        other.write_bytes(file.read_bytes())
        os.replace(other, file)
        with pytest.raises(ExpertReadError, match=r"expert 1: .*layer1\.safetensors: the file was exchanged"):
            list(cache.stream(1, [1]))
    finally:
        cache.close()


def test_an_abandoned_stream_gives_every_slot_back(store, reader, make_cache):
    cache = make_cache(4, readers=1)
    lease_all(cache, store, 1, [0, 1])
    reader.gate.clear()
    with cache.stream(1, [0, 2, 3, 4]) as stream:
        assert next(stream).experts.tolist() == [0]
        threading.Timer(0.02, reader.gate.set).start()
    slots = cache._layers[1]
    assert sorted([*slots.free, *slots.slot_of.values()]) == [0, 1, 2, 3]
    assert list(stream) == []
    assert cache.counters.loads <= 3, "the one read that had begun was kept, the others were cancelled"
    lease_all(cache, store, 1, [4, 3, 2, 0])


def test_the_next_stream_closes_one_that_was_dropped_half_way(store, make_cache):
    cache = make_cache(3)
    dropped = cache.stream(1, [0, 1, 2])
    next(dropped)
    lease_all(cache, store, 3, [0, 1, 2, 3])
    assert list(dropped) == []
    assert sorted([*cache._layers[1].free, *cache._layers[1].slot_of.values()]) == [0, 1, 2]


def test_read_threads_start_with_the_cache_and_end_with_it(reader, make_cache):
    before = threading.active_count()
    cache = make_cache(2, readers=3)
    assert threading.active_count() == before + 3
    cache.stream(1, [0, 1])
    cache.close()
    assert threading.active_count() == before
    assert reader.closed


def test_a_cleared_cache_reads_everything_but_pins_again(store, reader, make_cache):
    cache = make_cache(6)
    cache.pin(1, [4])
    lease_all(cache, store, 1, [0, 1, 2])
    lease_all(cache, store, 3, [3])
    reader.gate.clear()
    cache.prefetch(1, [5, 6])
    threading.Timer(0.05, reader.gate.set).start()
    cache.clear()
    assert residents(cache, 1) == {4}
    assert residents(cache, 3) == set()
    assert cache.prefetch_in_flight == 0
    counters = cache.counters
    assert counters.prefetch_issued == counters.prefetch_wasted == 2
    before = len(reader.log)
    lease_all(cache, store, 1, [0, 1, 2, 3, 4, 5])
    assert len(reader.log) > before
    assert len(cache.last_loads) == 5
