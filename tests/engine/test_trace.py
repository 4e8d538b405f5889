"""Routing traces: what they record, that a crash leaves a readable file, and what a replay says of them."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.engine import Engine
from coli_server.engine.replay import accesses, least_misses, misses
from coli_server.engine.step import Span
from coli_server.engine.store import StoreOptions
from coli_server.engine.trace import PROMPT, read_trace
from coli_server.errors import ConfigurationError
from coli_server.experts import EVICTION_POLICIES, LRU
from coli_server.routing import RoutePolicy
from support.served import MODELS, TINY

EXPECTED = dict(np.load(TINY / "expected.npz"))
PROMPT_IDS = EXPECTED["ids_1"].tolist()
ROUTED = RoutePolicy(mode="max-rank", j=1, m=16)
Open = Callable[..., Engine]


@pytest.fixture
def open_engine() -> Iterator[Open]:
    opened: list[Engine] = []

    def open_(folder: Path = TINY, **options: object) -> Engine:
        opened.append(Engine.open(folder, warm=False, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def record(open_engine: Open, file: Path, tokens: int = 10, **options: object) -> Engine:
    engine = open_engine(store=StoreOptions(trace=file), **options)
    engine.generate(PROMPT_IDS, tokens, ignore_eos=True)
    engine.close()
    return engine


def test_every_token_of_every_layer_is_recorded(open_engine: Open, tmp_path: Path) -> None:
    engine = record(open_engine, tmp_path / "t")
    header, records = read_trace(tmp_path / "t")
    assert (header.model, header.k, header.experts) == ("glm4_moe", engine.k, engine.experts)
    assert header.identity == engine.identity
    assert len(records) == (len(PROMPT_IDS) + 9) * 2
    prompt = (records["flags"] & PROMPT) > 0
    assert prompt.sum() == len(PROMPT_IDS) * 2
    positions = records["position"][records["slot"] == 0]
    assert positions.tolist() == list(range(len(PROMPT_IDS) + 9))
    assert len(set(records["step"].tolist())) == 1 + 9, "one step for the prompt, one for each token"
    assert len(set(records["sequence"].tolist())) == 1


def test_scores_rank_the_true_choices_and_substitutes_are_told_apart(
    open_engine: Open, tmp_path: Path
) -> None:
    record(open_engine, tmp_path / "t", policy=ROUTED, experts_per_layer=5)
    _, records = read_trace(tmp_path / "t")
    assert (np.diff(records["scores"], axis=1) <= 0).all()
    decoded = records[records["flags"] == 0]
    assert (decoded["true"] != decoded["chosen"]).any()
    prompt = records[records["flags"] > 0]
    assert (prompt["true"] == prompt["chosen"]).all()


def test_sequences_of_one_step_are_told_apart(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(store=StoreOptions(trace=tmp_path / "t"))
    pair = [engine.new_sequence(policy, engine.new_kv(8)) for policy in (engine.policy, ROUTED)]
    engine.step([Span(sequence, (3,), prompt=True, length=1) for sequence in pair])
    engine.step([Span(sequence, (4,), prompt=False, length=2) for sequence in pair])
    engine.close()
    _, records = read_trace(tmp_path / "t")
    assert len(records) == 2 * 2 * 2
    assert len(set(records["sequence"].tolist())) == 2
    assert len(set(records["step"].tolist())) == 2


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_half_a_record_at_the_end_is_dropped_and_overwritten(
    open_engine: Open, tmp_path: Path, cut: int
) -> None:
    file = tmp_path / "t"
    record(open_engine, file)
    whole = read_trace(file)[1]
    os.truncate(file, file.stat().st_size - cut)
    torn = read_trace(file)[1]
    assert torn.tobytes() == whole[:-1].tobytes()
    record(open_engine, file, tokens=3)
    again = read_trace(file)[1]
    assert again[: len(torn)].tobytes() == torn.tobytes()
    assert len(again) == len(torn) + (len(PROMPT_IDS) + 2) * 2
    assert again["step"][len(torn)] > torn["step"].max(), "steps of two runs are not mixed"
    assert not set(again["sequence"][len(torn) :].tolist()) & set(torn["sequence"].tolist())


def test_a_file_that_is_no_trace_of_this_model_is_left_alone(open_engine: Open, tmp_path: Path) -> None:
    file = tmp_path / "t"
    record(open_engine, file)
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match="is a trace of another model, 'glm4_moe'"):
        open_engine(MODELS / "olmoe", store=StoreOptions(trace=file))
    assert file.read_bytes() == before
    other = tmp_path / "notes.txt"
    other.write_text("important")
    with pytest.raises(ConfigurationError, match="is not a routing trace"):
        open_engine(store=StoreOptions(trace=other))
    assert other.read_text() == "important"
    with pytest.raises(ConfigurationError, match="No such file"):
        open_engine(store=StoreOptions(trace=tmp_path / "none" / "t"))


@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("trace") / "t"
    for head in (b"", b"COLITRC1"):
        file.write_bytes(head + data)
        with pytest.raises(ConfigurationError, match="is not a routing trace"):
            read_trace(file)


def test_a_disk_that_fails_ends_the_trace_and_no_request(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "t"
    expected = open_engine().generate(PROMPT_IDS, 10)
    engine = open_engine(store=StoreOptions(trace=file))
    assert engine.generate(PROMPT_IDS, 10) == expected
    assert engine.trace is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, hard))
    try:
        engine.trace.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("the trace ends here") == 1
    assert engine.generate(PROMPT_IDS, 10) == expected
    engine.trace.flush()
    assert len(read_trace(file)[1]) == 100 // read_trace(file)[0].record.itemsize
    with pytest.raises(ConfigurationError, match="/dev/full: No space left"):
        open_engine(store=StoreOptions(trace=Path("/dev/full")))


def test_a_replay_misses_exactly_what_the_real_cache_missed(open_engine: Open, tmp_path: Path) -> None:
    for name, policy in EVICTION_POLICIES.items():
        for slots in (4, 6, 9):
            file = tmp_path / f"{name}{slots}"
            engine = open_engine(experts_per_layer=slots, store=StoreOptions(trace=file, evict=name))
            engine.generate(PROMPT_IDS, 30, ignore_eos=True)
            engine.close()
            layers = accesses(read_trace(file)[1], 2, "chosen")
            assert sum(misses(steps, slots, policy) for steps in layers) == engine.cache.counters.loads


def fewest_by_search(steps: list[list[int]], slots: int, *, bypass: bool) -> int:
    """The least possible misses, by trying every possible choice of what to keep."""
    states = {frozenset[int](): 0}
    for wanted in steps:
        following: dict[frozenset[int], int] = {}
        for state, missed in states.items():
            cost = missed + len(set(wanted) - state)
            everything = state | set(wanted)
            for size in range(min(slots, len(everything)) + 1):
                for kept in itertools.combinations(sorted(everything), size):
                    if bypass or set(wanted) <= set(kept):
                        key = frozenset(kept)
                        following[key] = min(following.get(key, cost), cost)
        states = following
    return min(states.values())


small_steps = st.lists(
    st.lists(st.integers(0, 4), unique=True, min_size=1, max_size=2), min_size=1, max_size=7
)


@given(steps=small_steps, slots=st.integers(2, 4))
def test_belady_is_the_optimum(steps: list[list[int]], slots: int) -> None:
    for bypass in (False, True):
        best = fewest_by_search(steps, slots, bypass=bypass)
        assert least_misses(steps, slots, bypass=bypass) == best
    assert misses(steps, slots, LRU) >= least_misses(steps, slots, bypass=False)


@given(
    steps=st.lists(st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=8), max_size=30),
    slots=st.integers(1, 8),
)
def test_no_policy_beats_the_optimum_or_reads_what_it_has(steps: list[list[int]], slots: int) -> None:
    lookups = sum(map(len, steps))
    distinct = len({expert for wanted in steps for expert in wanted})
    bypassing = least_misses(steps, slots, bypass=True)
    assert distinct <= bypassing <= least_misses(steps, slots, bypass=False) <= lookups
    for policy in EVICTION_POLICIES.values():
        found = misses(steps, slots, policy)
        assert bypassing <= found <= lookups
        if slots == 8:
            assert found == distinct


def test_a_step_wants_an_expert_once_however_many_tokens_do() -> None:
    records = np.zeros(4, np.dtype([("step", "<u4"), ("slot", "<u2"), ("true", "<u2", 2)]))
    records["step"] = [1, 1, 1, 2]
    records["slot"] = [0, 0, 1, 0]
    records["true"] = [[3, 1], [1, 2], [5, 6], [1, 3]]
    assert accesses(records, 2, "true") == [[[3, 1, 2], [1, 3]], [[5, 6]]]
