"""SCORE through a real daemon's sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

SCORE = 'SCORE {}{{"context": "the sea is", "continuation": " deep and wide"}}'
STOCK, ROUTED = SCORE.format(""), SCORE.format("cache_route=1 route_scope=session route_j=0 route_m=16 ")


async def test_routing_is_stock_whatever_the_daemons_settings_say(serve: Any) -> None:
    answers = []
    for settings in ({}, {"cache_route": True, "route_j": 0, "route_m": 16}):
        client = await (await serve(**settings)).connect()
        client.send(STOCK)
        answers.append(await client.words("DONE"))
    assert answers[0] == answers[1]
    assert answers[0]["mode"] == "stock"
    assert answers[0]["finish"] == "stop"


async def test_a_request_and_a_session_can_ask_for_another_policy(client: Any) -> None:
    client.send(STOCK, ROUTED)
    stock, routed = await client.words("DONE"), await client.words("DONE")
    assert stock["logprob"] != routed["logprob"]
    assert int(routed["route_swaps"]) > 0
    assert (routed["mode"], routed["scope"]) == ("max-rank", "session")
    for option in ("cache_route 1", "route_scope session", "route_j 0", "route_m 16"):
        assert await client.ask(f"SET {option}") == "OK"
    client.send(STOCK)
    assert (await client.words("DONE"))["logprob"] == routed["logprob"]


async def test_scores_beside_generations_and_alone_are_equal(client: Any) -> None:
    client.send(STOCK)
    alone = (await client.words("DONE"))["logprob"]
    client.send("GEN id=g max=40 hello", *(SCORE.format(f"id=s{n} ") for n in range(6)))
    lines = [await client.line() for _ in range(7)]
    while sum(line.startswith("DONE ") for line in lines) < 7:
        lines.append(await client.line())
    scores = [line for line in lines if line.startswith("DONE s")]
    assert len(scores) == 6
    assert all(f" logprob={alone} " in line for line in scores)


async def test_what_does_not_fit_is_refused_before_it_is_accepted(serve: Any) -> None:
    client = await (await serve(context=64)).connect()
    body = {"context": [1] * 40, "continuation": [2] * 24}
    assert (await client.ask(f"SCORE {json.dumps(body)}")).startswith("ACK 1 prompt_tokens=40")
    assert (await client.words("DONE"))["tokens"] == "24"
    body["continuation"] += [2]
    refusal = await client.ask(f"SCORE {json.dumps(body)}")
    assert refusal.startswith("ERR CONTEXT_EXCEEDED prompt_tokens=65 capacity=64")
    assert (await client.ask('SCORE {"context": [1], "continuation": [99999999]}')).startswith(
        "ERR BAD_REQUEST"
    )


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_score_can_be_ended(client: Any, how: str) -> None:
    body = json.dumps({"context": [1], "continuation": [2] * 3000})
    option = "deadline_ms=1 " if how == "deadline" else ""
    client.send(f"SCORE id=x cache_route=1 {option}{body}")
    assert (await client.line()).startswith("ACK x")
    if how == "cancel":
        assert await client.ask("CANCEL x") == "OK"
    words = await client.words("DONE x")
    assert words["finish"] == {"cancel": "cancelled", "deadline": "deadline"}[how]
    assert "logprob" not in words
    assert "greedy" not in words


async def test_counters_add_up(running: Any, client: Any) -> None:
    client.send(STOCK, ROUTED)
    await client.words("DONE")
    await client.words("DONE")
    figures = await running.figures_when(requests_total="2", requests_stop_total="2")
    assert int(figures["lookups"]) == sum(int(figures[name]) for name in ("hits_pin", "hits_lru", "misses"))
    assert int(figures["prefill_lookups"]) > 0
    assert figures["generated_tokens_total"] == "0"


async def test_scores_are_no_generations_in_the_histograms(running: Any, client: Any) -> None:
    client.send(STOCK)
    await client.words("DONE")
    latencies = running.daemon._latencies.snapshot()
    assert latencies["request"].count == 1
    assert latencies["decode"].count == 0
