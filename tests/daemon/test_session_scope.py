"""Session scope through sockets: nothing that others do, and nothing physical, reaches a request's bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coli_server.engine.step import RowGroup

SEED = "temp=0.8 top_k=50 seed=11 logprobs=3"
SESSION_SCOPE = "cache_route=1 route_scope=session route_j=1 route_m=14 route_capacity=6"
B = f"GEN id=b max=48 {SEED} {SESSION_SCOPE} The cat sat on the mat and said"
A = "GEN id=a max=200 temp=1.5 seed={seed} cache_route=1 route_j=1 route_m=14 Something else entirely"
ROUTED = ("route_swaps", "route_slots", "route_agree", "route_kl", "swap_pct", "tokens", "finish", "scope")


def own_bytes(lines: list[str], end: str) -> tuple[list[str], dict[str, str]]:
    """What must not change of request b: its TOK lines, and the words of its DONE line that are not times."""
    words = dict(word.split("=", 1) for word in end.split()[2:])
    return [line for line in lines if line.startswith("TOK b ")], {name: words[name] for name in ROUTED}


async def ask_b(client: Any, command: str = B) -> tuple[list[str], dict[str, str]]:
    client.send(command)
    lines = await client.until("DONE b ")
    return own_bytes(lines, lines[-1])


async def evictions(running: Any) -> int:
    return int((await (await running.connect()).stat())["evictions"])


async def alone(serve: Any, command: str, **settings: Any) -> Any:
    running = await serve(**settings)
    answer = await ask_b(await running.connect(), command)
    assert await evictions(running) > 0
    return answer


async def with_pilot(serve: Any, command: str) -> Any:
    """Beside A, with prefetch that really reads ahead."""
    return await beside(serve, command, 1, pilot=True, slots=8)


async def after_a(serve: Any, command: str) -> Any:
    running = await serve()
    other = await running.connect()
    other.send(A.format(seed=1))
    await other.until("DONE a ")
    answer = await ask_b(await running.connect(), command)
    assert await evictions(running) > 0
    return answer


async def beside(serve: Any, command: str, others: int, **settings: Any) -> Any:
    running = await serve(**settings)
    for seed in range(others):
        other = await running.connect()
        other.send(A.format(seed=seed))
        await other.until("TOK a ")
    answer = await ask_b(await running.connect(), command)
    figures = await (await running.connect()).stat()
    assert int(figures["evictions"]) > 0
    assert (int(figures["prefetch_issued"]) > 0) == bool(settings.get("pilot"))
    return answer


async def arms(serve: Any, command: str) -> dict[str, Any]:
    """Request b in every surrounding; each of them really evicts experts."""
    return {
        "alone": await alone(serve, command),
        "alone, least cache": await alone(serve, command, slots=4),
        "alone, large cache": await alone(serve, command, slots=13),
        "after A": await after_a(serve, command),
        "beside A": await beside(serve, command, 1),
        "in a batch of 8": await beside(serve, command, 7),
        "beside A, with PILOT": await with_pilot(serve, command),
    }


def differing(answers: dict[str, Any]) -> list[str]:
    return [name for name, answer in answers.items() if answer != answers["alone"]]


async def test_session_scope_is_a_function_of_the_request(serve: Any) -> None:
    answers = await arms(serve, B)
    assert differing(answers) == []
    tokens, words = answers["alone"]
    assert len(tokens) > 30
    assert int(words["route_swaps"]) > 0
    assert words["scope"] == "session"


async def test_session_scope_routes_prompts_too_when_asked(serve: Any) -> None:
    command = B.replace("route_j=1", "route_j=1 route_prefill=1")
    answers = {
        "alone": await alone(serve, command),
        "least cache": await alone(serve, command, slots=4),
        "beside A": await beside(serve, command, 1),
    }
    assert differing(answers) == []
    stock_prompt = await alone(serve, B)
    assert int(answers["alone"][1]["route_slots"]) > int(stock_prompt[1]["route_slots"])


async def test_cache_prior_in_session_scope_is_a_function_of_the_request(serve: Any) -> None:
    command = B.replace("cache_route=1", "cache_route=1 route_mode=cache-prior route_lambda=0.6")
    answers = {
        "alone": await alone(serve, command),
        "least cache": await alone(serve, command, slots=4),
        "in a batch of 4": await beside(serve, command, 3),
    }
    assert differing(answers) == []
    assert int(answers["alone"][1]["route_swaps"]) > 0


async def test_a_planted_leak_is_found(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The physical cache shows through: the comparison above must notice."""
    monkeypatch.setattr(RowGroup, "residency", lambda _group, _slot, physical: physical)
    answers = {"alone": await alone(serve, B), "least cache": await alone(serve, B, slots=4)}
    answers["in a batch of 8"] = await beside(serve, B, 7)
    assert differing(answers) == ["least cache", "in a batch of 8"]


async def test_shared_scope_may_differ_and_says_so(serve: Any) -> None:
    command = B.replace("route_scope=session ", "").replace("route_capacity=6 ", "")
    answers = {"alone": await alone(serve, command), "beside": await beside(serve, command, 3)}
    answers["least cache"] = await alone(serve, command, slots=4)
    assert differing(answers) != []
    assert answers["alone"][1]["scope"] == "shared"


async def test_an_earlier_request_of_the_same_session_changes_nothing(serve: Any) -> None:
    running = await serve()
    client = await running.connect()
    first = await ask_b(client)
    client.send(A.format(seed=3).replace("route_j=1", "route_j=0 route_scope=session"))
    await client.until("DONE a ")
    assert await ask_b(client) == first


async def test_route_agree_1_with_stock_routing_reads_100_and_0(serve: Any) -> None:
    running = await serve(route_agree=True)
    client = await running.connect()
    client.send("GEN id=b max=16 Hello")
    lines = await client.until("DONE b ")
    words = dict(word.split("=", 1) for word in lines[-1].split()[2:])
    assert (words["route_agree"], words["route_kl"], words["mode"]) == ("100.0", "0.0000", "stock")
    figures = await client.stat("route")
    assert (float(figures["route_agree"]), float(figures["route_kl"])) == (100.0, 0.0)


async def test_route_agree_0_silences_the_meters(serve: Any) -> None:
    running = await serve(cache_route=True, route_agree=False)
    client = await running.connect()
    client.send("GEN id=b max=16 Hello")
    lines = await client.until("DONE b ")
    assert "route_agree=" not in lines[-1]
    assert "route_kl=" not in lines[-1]
    assert "swap_pct=" in lines[-1]
    figures = await client.stat()
    assert not {"route_agree", "route_kl", "route_mass_kept"} & figures.keys()


async def test_stat_route_shows_starvation_and_lock_in(serve: Any) -> None:
    running = await serve()
    client = await running.connect()
    client.send("GEN id=b max=64 temp=1 cache_route=1 route_j=0 route_m=16 Hello")
    await client.until("DONE b ")
    figures = await client.stat("route")
    assert 4 <= int(figures["route_distinct_min"]) <= float(figures["route_distinct_median"]) <= 16
    assert int(figures["route_swap_run_max"]) >= 1


async def test_options_of_a_request_win_over_the_session_s_and_those_over_the_daemon_s(serve: Any) -> None:
    running = await serve(route_m=9)
    client = await running.connect()

    async def swaps(options: str = "") -> int:
        client.send(f"GEN id=x max=40 temp=2 seed=5 {options} Hi")
        line = (await client.until("DONE x "))[-1]
        return int(dict(word.split("=", 1) for word in line.split()[2:])["route_swaps"])

    assert await swaps() == 0
    assert await swaps("cache_route=1 route_j=4") == 0
    assert await swaps("cache_route=1 route_j=0") > 0
    assert await client.ask("SET cache_route 1") == "OK"
    assert await client.ask("SET route_m 4") == "OK"
    assert await swaps() == 0
    assert await swaps("route_j=0 route_m=16") > 0
    figures = await client.stat("session")
    assert (figures["cache_route"], figures["route_m"], figures["route_j"]) == ("1", "4", "2")
    assert (await client.stat())["route_m"] == "9"


async def test_prompts_are_stock_bit_for_bit_unless_routed(serve: Any) -> None:
    """The first token and its log-probabilities come from the prompt alone."""
    running = await serve(slots=4)
    client = await running.connect()
    prompt = "One two three four five six seven eight"
    firsts = {}
    for name, options in {
        "stock": "",
        "routed": "cache_route=1 route_j=0 route_m=16",
        "prompt": "cache_route=1 route_j=0 route_m=16 route_prefill=1",
    }.items():
        client.send(f"GEN id=b max=1 logprobs=5 {options} {prompt}")
        firsts[name] = json.loads((await client.until("TOK b "))[-1].split(" ", 3)[3])
        await client.until("DONE b ")
    assert firsts["routed"] == firsts["stock"]
    assert firsts["prompt"] != firsts["stock"]
