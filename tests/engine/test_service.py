"""The engine thread: batching, outcomes, counters, and which KV is reused by whom."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from coli_server.engine.api import Failed, Finished, Progress, SamplingOptions, Started, TextChunk
from coli_server.engine.service import NICE, SYSTEM
from coli_server.routing import RoutePolicy
from coli_server.telemetry.counters import Counters
from support.served import TINY, Served

EXPECTED = dict(np.load(TINY / "expected.npz"))
PROMPTS = [EXPECTED[f"ids_{i}"].tolist() for i in range(3)]
GREEDY = [EXPECTED[f"greedy_{i}"].tolist() for i in range(3)]
ROUTED = RoutePolicy(mode="max-rank", j=1, m=12)
Serve = Callable[..., Served]


def prefilled(served: Served, key: int) -> int:
    """Prompt tokens that were computed for a request, the reused ones left out."""
    return served.wait(key, Finished).counters.prefill_lookups // (2 * served.engine.k)  # two MoE layers


def test_greedy_tokens_are_those_of_the_reference(serve: Serve) -> None:
    served = serve()
    finished, ids = served.run(PROMPTS[1], 24)
    assert ids == GREEDY[1][: len(ids)]
    assert finished.tokens == len(ids) + (finished.finish == "stop")
    assert isinstance(served.seen[1][0], Started)


def test_requests_batched_together_give_what_each_gives_alone(serve: Serve) -> None:
    served = serve()
    alone = [served.run(prompt, 20)[1] for prompt in PROMPTS]
    keys = [served.submit(prompt, 20, session=f"s{i}") for i, prompt in enumerate(PROMPTS)]
    assert [served.finish(key)[1] for key in keys] == alone


def test_meters_count_one_step_less_than_tokens(serve: Serve) -> None:
    served = serve()
    finished, _ = served.run(PROMPTS[1], 6)
    steps = finished.tokens - 1
    counters = finished.counters
    assert counters.route_slots == counters.lookups == steps * 2 * served.engine.k
    assert counters.lookups == counters.hits_pin + counters.hits_lru + counters.misses
    assert counters.prefill_lookups == len(PROMPTS[1]) * 2 * served.engine.k
    assert counters.decode_steps == steps


def test_counters_of_sessions_and_closed_ones_add_up_to_the_cache_s_own(serve: Serve) -> None:
    served = serve(experts_per_layer=4)
    for session in ("a", "b"):
        served.run(PROMPTS[2], 8, session=session)
    served.service.drop("a")
    served.run(PROMPTS[0], 4, session="b")
    snapshot = served.service.snapshot()
    assert set(snapshot.sessions) == {"b", SYSTEM}
    total = sum(snapshot.sessions.values(), Counters()) + snapshot.closed
    assert total.loads == served.engine.cache.counters.loads > 0
    assert total.load_bytes == served.engine.cache.counters.load_bytes
    assert snapshot.closed.prompt_tokens_total == len(PROMPTS[2])


def test_a_request_waits_for_its_turn_and_can_be_cancelled_there(serve: Serve) -> None:
    served = serve(max_running=1)
    first = served.submit(PROMPTS[1], 200)
    second = served.submit(PROMPTS[1], 4)
    served.service.cancel(second)
    served.service.cancel(first)
    assert served.finish(second)[0].tokens == 0
    assert served.finish(second)[0].finish == "cancelled"
    assert served.finish(first)[0].finish in ("cancelled", "stop")


def test_a_deadline_ends_a_request_between_tokens(serve: Serve) -> None:
    served = serve()
    finished, _ = served.run(PROMPTS[1], 400, deadline=time.monotonic())
    assert finished.finish == "deadline"


def test_only_the_engine_gives_way_to_whoever_answers(serve: Serve) -> None:
    """Kernel threads come with the first kernel that needs them, and have what its thread has then."""
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    before = set(threading.enumerate())
    served = serve()
    new = [thread for thread in threading.enumerate() if thread not in before]
    (engine,) = [thread for thread in new if thread.name == "coli-engine"]
    assert engine.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, engine.native_id) == NICE
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    readers = [thread for thread in new if thread.name.startswith("expert-read")]
    assert readers
    for reader in readers:
        assert reader.native_id is not None
        assert os.getpriority(os.PRIO_PROCESS, reader.native_id) == own
    served.run(PROMPTS[1], 4)


def test_stopping_the_service_drains_what_runs(serve: Serve) -> None:
    served = serve()
    key = served.submit(PROMPTS[1], 400, sampling=SamplingOptions(temperature=5.0))
    served.wait(key, TextChunk)
    assert served.service.stop(30)
    assert served.finish(key)[0].finish in ("drained", "stop")


def test_a_seed_gives_the_same_tokens_again(serve: Serve) -> None:
    served = serve()
    options = SamplingOptions(temperature=1.5, top_k=40, top_p=0.95, seed=7)
    first = served.run(PROMPTS[1], 16, sampling=options)[1]
    served.run(PROMPTS[2], 4, sampling=options)
    assert served.run(PROMPTS[1], 16, sampling=options)[1] == first


def test_gen_reuses_the_prompt_kv_of_its_session_and_no_other(serve: Serve) -> None:
    served = serve()
    prompt = PROMPTS[2]
    first, other, again = (
        served.submit(prompt, 4, session="a"),
        served.submit(prompt, 4, session="b"),
        served.submit(prompt, 4, session="a"),
    )
    texts = [served.finish(key)[1] for key in (first, other, again)]
    assert texts[0] == texts[1] == texts[2]
    served_again = served.submit(prompt, 4, session="a")
    served.finish(served_again)
    assert prefilled(served, first) == prefilled(served, other) == len(prompt)
    assert prefilled(served, served_again) == 1


def test_stock_decoded_kv_is_bit_equal_to_prefilled_kv(serve: Serve) -> None:
    engine = serve().engine
    ids = PROMPTS[2]
    read = engine.new_sequence(engine.policy, engine.new_kv(len(ids)))
    decoded = engine.new_sequence(engine.policy, engine.new_kv(len(ids)))
    from coli_server.engine.step import Span

    engine.step([Span(read, tuple(ids), True, len(ids))])
    for position, token in enumerate(ids):
        engine.step([Span(decoded, (token,), False, position + 1)])
    assert decoded.kv.stock == read.kv.stock == len(ids)
    for mine, theirs in zip(read.kv.keys + read.kv.values, decoded.kv.keys + decoded.kv.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_gen_never_reuses_kv_made_by_cache_aware_routing(serve: Serve) -> None:
    served = serve(experts_per_layer=4)
    prompt = PROMPTS[1]
    key = served.submit(prompt, 8, policy=ROUTED)
    finished, ids = served.finish(key)
    assert finished.counters.route_swaps > 0
    longer = [*prompt, *ids, 3]
    follow_up = served.submit(longer, 4)
    _, text = served.finish(follow_up)
    assert prefilled(served, follow_up) == len(longer) - len(prompt)
    assert text == served.run(longer, 4, session="fresh")[1]


def test_chat_reuses_its_generated_kv_until_a_routing_option_changes(serve: Serve) -> None:
    served = serve(experts_per_layer=4)
    prompt = PROMPTS[1]
    finished, ids = served.run(prompt, 8, kind="chat", policy=ROUTED)
    assert finished.counters.route_swaps > 0
    longer = [*prompt, *ids, 3]
    same = served.submit(longer, 1, kind="chat", policy=ROUTED)
    served.finish(same)
    assert prefilled(served, same) == len(longer) - (len(prompt) + finished.tokens - 1)
    served.run([*prompt, *ids], 8, kind="chat", policy=ROUTED)
    changed = served.submit(longer, 1, kind="chat", policy=RoutePolicy(mode="max-rank", j=2, m=12))
    served.finish(changed)
    assert prefilled(served, changed) >= len(longer) - len(prompt) - len(ids)


def test_a_cache_aware_prompt_reuses_and_leaves_no_kv(serve: Serve) -> None:
    served = serve(experts_per_layer=4)
    policy = RoutePolicy(mode="max-rank", j=1, m=12, prefill=True)
    prompt = PROMPTS[2]
    served.run(prompt, 4)
    routed, _ = served.run(prompt, 4, policy=policy)
    assert routed.counters.prefill_lookups == 0
    assert routed.counters.route_slots == (len(prompt) + routed.tokens - 1) * 2 * served.engine.k
    served.service.forget("s")
    served.run(prompt, 4, policy=policy)
    after = served.submit(prompt, 4)
    served.finish(after)
    assert prefilled(served, after) == len(prompt)


def test_forget_drops_the_session_s_kv(serve: Serve) -> None:
    served = serve()
    served.run(PROMPTS[2], 4)
    assert served.service.snapshot().kv_bytes > 0
    served.service.forget("s")
    key = served.submit(PROMPTS[2], 4)
    served.finish(key)
    assert prefilled(served, key) == len(PROMPTS[2])


def test_a_long_prompt_reports_progress_and_lets_others_decode(serve: Serve) -> None:
    served = serve(context=512)
    running = served.submit(PROMPTS[1], 300, session="a", sampling=SamplingOptions(temperature=3.0))
    served.wait(running, TextChunk)
    reading = served.submit([5 + i % 400 for i in range(200)], 2, session="b")
    served.finish(reading)
    steps = [event for event in served.seen[reading] if isinstance(event, Progress)]
    assert steps[-1].done == steps[-1].total == 200
    served.service.cancel(running)
    served.finish(running)


@pytest.mark.parametrize("policy", [RoutePolicy(mode="off"), ROUTED])
def test_nan_weights_fail_only_the_request_that_meets_them(serve: Serve, policy: RoutePolicy) -> None:
    served = serve()
    table = served.engine.model._embeddings.data
    saved = table[7].copy()
    table[7] = 0x7FC0  # bfloat16 NaN: only a prompt with token 7 meets it
    try:
        good = served.submit(PROMPTS[1], 6, policy=policy)
        bad = served.submit([5, 7, 9], 6, session="bad", policy=policy)
        event = served.wait(bad)
        assert isinstance(event, Failed)
        assert event.code == "MODEL"
        assert served.finish(good)[1]
    finally:
        table[7] = saved


def test_memory_pressure_cannot_change_a_dialogue_in_session_scope(serve: Serve) -> None:
    """Whether the KV of an answer survives until the next turn is a matter of memory, not of the request."""
    policy = RoutePolicy(mode="max-rank", j=0, m=16, scope="session", capacity=4)
    drawn = SamplingOptions(temperature=2.0, seed=4)
    turns = []
    for evicted in (False, True):
        served = serve()
        finished, ids = served.run(PROMPTS[1], 12, kind="chat", policy=policy, sampling=drawn)
        assert finished.counters.route_swaps > 0
        if evicted:
            served.service.forget("s")
        longer = [*PROMPTS[1], *ids, 3, 4]
        turns.append(served.run(longer, 12, kind="chat", policy=policy, sampling=drawn)[1])
    assert turns[0] == turns[1]
