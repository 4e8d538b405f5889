"""Looking ahead: it changes what is in memory and never what stock or session-scope routing computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.pilot import by_popularity
from coli_server.engine.service import SYSTEM
from coli_server.engine.step import Span
from coli_server.engine.store import StoreOptions, describe_mode
from coli_server.routing import RoutePolicy
from coli_server.telemetry.counters import Counters
from support.served import TINY, Served

EXPECTED = dict(np.load(TINY / "expected.npz"))
PROMPTS = [EXPECTED[f"ids_{i}"].tolist() for i in range(3)]
SESSION = RoutePolicy(mode="max-rank", j=1, m=8, scope="session")
PRIOR = RoutePolicy(mode="cache-prior", lam=0.5, scope="session", prefill=True)
SHARED = RoutePolicy(mode="max-rank", j=1, m=8)
PILOT = StoreOptions(pilot=True)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def open_(**options: object) -> Engine:
        opened.append(Engine.open(TINY, warm=False, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def logits_of_a_dialogue(engine: Engine) -> bytes:
    """Every logit of a prompt and of 24 greedy tokens behind it, as bytes."""
    sequence = engine.new_sequence(engine.policy, engine.new_kv(64))
    prompt = tuple(PROMPTS[2][:32])
    chunk = engine.prompt_chunk(engine.policy)
    rows = []
    for at in range(0, len(prompt), chunk):
        part = prompt[at : at + chunk]
        rows.append(engine.step([Span(sequence, part, prompt=True, length=len(prompt), want="all")]))
    for _ in range(24):
        token = int(rows[-1][-1].argmax())
        rows.append(engine.step([Span(sequence, (token,), prompt=False, length=sequence.position + 1)]))
    return np.concatenate(rows).tobytes()


@pytest.mark.parametrize("policy", [RoutePolicy(mode="off"), SESSION, PRIOR], ids=lambda p: p.describe())
@pytest.mark.parametrize("slots", [4, 6])
def test_output_is_the_same_bit_for_bit(
    open_engine: Callable[..., Engine], policy: RoutePolicy, slots: int
) -> None:
    without = logits_of_a_dialogue(open_engine(policy=policy, experts_per_layer=slots))
    engine = open_engine(policy=policy, experts_per_layer=slots, store=PILOT)
    assert logits_of_a_dialogue(engine) == without
    assert engine.cache.counters.prefetch_issued > 0


def test_a_good_part_of_the_guesses_is_right(open_engine: Callable[..., Engine]) -> None:
    """Random weights, so less than a trained model's: still better than the 3 of 16 of a blind guess."""
    engine = open_engine(experts_per_layer=6, store=PILOT)
    logits_of_a_dialogue(engine)
    counters = engine.cache.counters
    right = counters.prefetch_used + counters.prefetch_late
    assert right > counters.prefetch_issued * 0.3


def test_a_model_that_is_wholly_in_memory_is_not_guessed_about(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(store=PILOT)
    engine.logits(PROMPTS[2])
    for layer in engine.cache.layers:
        for _ in engine.cache.stream(layer, range(engine.experts)):
            pass
    issued = engine.cache.counters.prefetch_issued
    engine.generate(PROMPTS[0], 8)
    assert engine.cache.counters.prefetch_issued == issued


def test_prefetched_reads_belong_to_the_system(serve: Callable[..., Served]) -> None:
    served = serve(experts_per_layer=6, store=PILOT, policy=SHARED)
    for session in ("a", "b"):
        served.run(PROMPTS[1], 12, session=session, policy=SHARED if session == "b" else RoutePolicy("off"))
    served.service.drop("a")
    served.run(PROMPTS[0], 12, session="b")
    snapshot = served.service.snapshot()
    counters = served.engine.cache.counters
    total = sum(snapshot.sessions.values(), Counters()) + snapshot.closed
    assert (total.loads, total.load_bytes) == (counters.loads, counters.load_bytes)
    assert snapshot.sessions[SYSTEM].loads == counters.system_loads > 0
    assert snapshot.prefetch_issued == counters.prefetch_issued > 0
    outcomes = ("used", "late", "wasted", "failed", "in_flight")
    assert snapshot.prefetch_issued == sum(getattr(snapshot, f"prefetch_{name}") for name in outcomes)
    assert total.lookups == total.hits_pin + total.hits_lru + total.misses


def test_a_completed_prefetch_is_resident_for_shared_scope(open_engine: Callable[..., Engine]) -> None:
    """The router keeps to residents, so what was prefetched for it is chosen where it may be."""
    engine = open_engine(policy=SHARED, experts_per_layer=8)
    layer = engine.cache.layers[0]
    wanted = [3, 7, 11, 15]
    engine.cache.prefetch(layer, wanted)
    while not engine.cache.resident(layer)[wanted].all():
        engine.cache.poll()
    policy = RoutePolicy(mode="max-rank", j=0, m=16, prefill=True)
    sequence = engine.new_sequence(policy, engine.new_kv(4))
    engine.step([Span(sequence, (PROMPTS[0][0],), prompt=True, length=1)])
    assert engine.cache.counters.prefetch_used == len(wanted)
    assert sequence.counters.hits_lru >= len(wanted)


def test_mode_says_that_the_pilot_is_on() -> None:
    assert describe_mode(RoutePolicy(mode="off"), pilot=True) == "stock,pilot"
    assert describe_mode(SHARED, pilot=True) == "max-rank,J=1,M=8,shared,pilot"
    assert describe_mode(SHARED, pilot=False) == SHARED.describe()


def test_popularity_counts_rows_and_then_ranks() -> None:
    first = np.array([[4, 1, 2], [4, 2, 0]], np.int32)
    second = np.array([[7, 2]], np.int32)
    assert by_popularity([first, second], 8) == [2, 4, 7, 1, 0]
