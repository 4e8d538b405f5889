"""Eviction policies: the contract that all keep, and what each of them values."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.experts import EVICTION_POLICIES, LFU, LRU, Learned
from coli_server.experts.frequency import LFU_HALF_LIFE

operations = st.lists(
    st.tuples(st.sampled_from(["use", "offer", "remove", "victim"]), st.integers(0, 9)), max_size=120
)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(operations=operations)
def test_every_policy_holds_what_it_was_given(name, operations):
    policy, held, offered = EVICTION_POLICIES[name](), set(), set()
    for operation, expert in operations:
        if operation == "use":
            (policy.touch if expert in held else policy.insert)(expert)
            held.add(expert)
            offered.discard(expert)
        elif operation == "offer" and expert not in held:
            policy.offer(expert)
            held.add(expert)
            offered.add(expert)
        elif operation == "remove" and expert in held:
            policy.remove(expert)
            held.discard(expert)
            offered.discard(expert)
        elif operation == "victim":
            keep = {expert, expert + 1}
            victim = policy.victim(keep, [0])
            allowed = held - keep - {0}
            assert victim in allowed if allowed else victim is None
            if offered & allowed:
                assert victim in offered, "what was read ahead and not used goes first"
        assert sorted(policy) == sorted(held)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_there_is_no_victim_in_an_empty_layer(name):
    assert EVICTION_POLICIES[name]().victim() is None


def test_lru_gives_up_the_one_unused_for_longest():
    policy = LRU()
    for expert in (1, 2, 3, 1):
        (policy.touch if expert in list(policy) else policy.insert)(expert)
    assert list(policy) == [2, 3, 1]


@pytest.mark.parametrize("make", [LFU, Learned])
def test_frequency_outweighs_one_late_use(make):
    policy = make()
    for expert in (1, 2, 3):
        policy.insert(expert)
    for _ in range(20):
        policy.touch(1)
        policy.touch(2)
    policy.touch(3)
    assert policy.victim() == 3


@pytest.mark.parametrize("make", [LFU, Learned])
def test_an_old_favourite_is_given_up_in_the_end(make):
    policy = make()
    for expert in (1, 2, 3):
        policy.insert(expert)
    for _ in range(500):
        policy.touch(1)
    for _ in range(60 * LFU_HALF_LIFE):
        policy.touch(2)
        policy.touch(3)
    assert policy.victim() == 1


@pytest.mark.parametrize("make", [LFU, Learned])
def test_what_was_learned_of_an_expert_outlives_its_eviction(make):
    policy = make()
    for expert in (1, 2):
        policy.insert(expert)
    for _ in range(30):
        policy.touch(1)
    policy.remove(1)
    policy.insert(3)
    policy.insert(1)
    assert policy.victim() != 1


def test_learned_finds_the_time_scale_that_predicts():
    """Favourites that change often ask for a short memory, those that stay for a long one."""
    fast, slow = Learned(), Learned()
    rng = random.Random(1)
    for turn in range(6000):
        for policy, favourites in ((fast, [turn // 60 % 16]), (slow, [0, 5, 9, 12])):
            expert = rng.choice(favourites) if rng.random() < 0.8 else rng.randrange(16)
            (policy.touch if expert in policy._order else policy.insert)(expert)
    assert fast._best._half_life == 4
    assert slow._best._half_life > 16


def test_learned_stays_finite_for_ever():
    policy = Learned()
    policy.insert(0)
    for _ in range(5000):
        policy.touch(0)
    policy.insert(1)
    assert policy.victim() == 1
    assert all(0 < scale._total < 1e101 for scale in policy._scales)


def test_counts_of_lfu_stay_bounded():
    """They name buckets: without a bound the sparse list of buckets would grow with the uptime."""
    policy = LFU()
    for expert in range(4):
        policy.insert(expert)
    for _ in range(10_000):
        policy.touch(0)
    assert max(policy._count.values()) <= 2 * LFU_HALF_LIFE * 4
