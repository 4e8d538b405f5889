"""Sizes, the memory that is there, and how many experts it holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coli_server.errors import ConfigurationError
from coli_server.experts import available_memory, format_size, parse_size, plan, resident_bytes
from coli_server.experts.slab import slab_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("800M", 800 << 20),
        ("800 MB", 800 << 20),
        ("64k", 64 << 10),
        ("1T", 1 << 40),
        ("1048576", 1 << 20),
        ("1048576B", 1 << 20),
        ("0.25g", 1 << 28),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "2GG",
        "-2G",
        "+2G",
        "2_0G",
        "0",
        "0G",
        "1.5",
        "1e9",
        "2 X",
        "٢G",
        "1.G",
        ".5G",
        " 2G",
        "2G\n",
        "9" * 30,
        "9999999999T",
        "inf",
    ],
)
def test_rubbish_is_refused_by_the_name_of_the_setting(text):
    with pytest.raises(ConfigurationError, match=r"COLI_RAM=.* is not a size: expected") as caught:
        parse_size(text, "COLI_RAM")
    assert "\n" not in str(caught.value)


@given(st.integers(1, 1 << 60))
def test_a_formatted_size_reads_back_as_no_less(nbytes):
    assert nbytes <= parse_size(format_size(nbytes)) < nbytes + (1 << 20)


def small_plan(ram, **changes):
    arguments = {
        "dense_bytes": 100_000_000,
        "kv_bytes": 20_000_000,
        "activation_bytes": 5_000_000,
        "staging_bytes": 1_000_000,
        "slot_bytes": [1 << 20] * 4,
        "experts": [16] * 4,
        "k": 4,
    }
    return plan(ram, **{**arguments, **changes})


FIXED = 126_000_000


def test_the_slots_fill_the_budget():
    result = small_plan(FIXED + (40 << 20) + 100)
    assert (result.slots_per_layer, result.limited_by) == (10, "ram")
    assert result.cache_bytes == 40 << 20
    assert result.total_bytes == FIXED + (40 << 20)


def test_a_refused_budget_never_reads_like_the_least_that_works():
    with pytest.raises(ConfigurationError, match=r"--ram=136M is too small.* least that works is --ram=137M"):
        small_plan(FIXED + (16 << 20) - 1)


def test_a_wide_layer_is_priced_at_its_own_width():
    assert (
        small_plan(FIXED + (40 << 20), slot_bytes=[1 << 20, 1 << 20, 1 << 20, 3 << 20]).slots_per_layer == 6
    )


def test_more_memory_than_experts_gives_every_expert_a_slot():
    assert small_plan(1 << 40).limited_by == "experts"
    assert small_plan(1 << 40, experts_per_layer=99).slots_per_layer == 16


def test_a_smaller_number_of_the_user_is_obeyed_and_never_raised():
    result = small_plan(1 << 40, experts_per_layer=5)
    assert (result.slots_per_layer, result.limited_by) == (5, "experts_per_layer")


def test_a_larger_number_of_the_user_does_not_break_the_budget():
    result = small_plan(FIXED + (40 << 20), experts_per_layer=12)
    assert (result.slots_per_layer, result.limited_by) == (10, "ram")


def test_fewer_than_a_token_needs_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"--experts-per-layer=3 is too small.* \(accepted: 4 to 16\)"
    ):
        small_plan(1 << 40, experts_per_layer=3)


def test_a_layer_with_few_experts_takes_no_slots_that_it_cannot_use():
    result = small_plan(1 << 40, experts=[16, 8, 16, 16])
    assert result.cache_bytes == (3 * 16 + 8) << 20


@given(
    st.lists(st.tuples(st.integers(1, 1 << 22), st.integers(8, 64)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 1 << 28),
    st.integers(0, 1 << 31),
    st.none() | st.integers(1, 80),
)
def test_a_plan_is_the_largest_that_fits_and_a_refusal_names_the_least_that_does(layers, k, fixed, ram, user):
    slot_bytes, experts = [size for size, _ in layers], [count for _, count in layers]
    assume(user is None or user >= k)

    def total(slots):
        return fixed + sum(slab_bytes(min(slots, count), size) for size, count in layers)

    def planned(ram):
        return plan(
            ram,
            dense_bytes=fixed,
            kv_bytes=0,
            activation_bytes=0,
            staging_bytes=0,
            slot_bytes=slot_bytes,
            experts=experts,
            k=k,
            experts_per_layer=user,
        )

    try:
        result = planned(ram)
    except ConfigurationError as error:
        assert ram < total(k)
        named = re.search(r"least that works is --ram=(\d+M)", str(error))
        least = parse_size(named[1])
        assert least - (1 << 20) < total(k) <= least
        assert planned(least).slots_per_layer >= k
        return
    assert k <= result.slots_per_layer <= max(experts)
    assert result.total_bytes == total(result.slots_per_layer) <= ram
    limit = max(experts) if user is None else min(user, max(experts))
    assert result.slots_per_layer == limit or total(result.slots_per_layer + 1) > ram


@pytest.fixture
def system(tmp_path):
    """A /proc and a cgroup mount of our own, to be filled by the test."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    8000 kB\n")
    cgroups.mkdir()
    return proc, cgroups


def limit(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_limits_the_available_memory_counts(system):
    assert available_memory(*system) == 8000 * 1024


def test_version_2_limits_of_the_group_and_of_those_above_it_count(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/user/coli\n")
    limit(cgroups / "user" / "coli", {"memory.max": "max\n", "memory.current": "10\n"})
    limit(cgroups / "user", {"memory.max": "5000000\n", "memory.current": "1000000\n"})
    assert available_memory(*system) == 4_000_000
    limit(cgroups / "user", {"memory.stat": "anon 5\ninactive_file 300000\n"})
    assert available_memory(*system) == 4_300_000


def test_version_1_limits_count(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("5:cpu:/x\n4:memory:/box\n0::/\n")
    limit(
        cgroups / "memory" / "box",
        {
            "memory.limit_in_bytes": "3000000\n",
            "memory.usage_in_bytes": "500000\n",
            "memory.stat": "total_inactive_file 100\n",
        },
    )
    assert available_memory(*system) == 2_500_100


@pytest.mark.parametrize("path", ["/docker/abc", "/../other"])
def test_in_a_container_that_does_not_see_its_own_path_the_limits_of_the_mount_count(system, path):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    limit(cgroups, {"memory.max": "2000000\n", "memory.current": "500000\n"})
    assert available_memory(*system) == 1_500_000


def test_a_system_that_does_not_tell_asks_for_the_setting(system):
    proc, cgroups = system
    (proc / "meminfo").write_text("MemTotal: 9000 kB\n")
    with pytest.raises(ConfigurationError, match="set --ram"):
        available_memory(proc, cgroups)


def test_this_machine_tells_both_figures():
    assert 0 < resident_bytes() < available_memory() + resident_bytes()
