"""Every figure adds up, whatever runs, ends or goes away."""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields
from typing import TYPE_CHECKING

from coli_server.daemon.figures import _without_unfinished
from coli_server.daemon.scheduler import Pace
from coli_server.telemetry.counters import Counters

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running, Serve

OUTCOMES = [item.name for item in fields(Counters) if item.name.startswith("requests_")]
OUTCOMES.remove("requests_total")


def check(figures: dict[str, str], *, unfinished: int) -> None:
    names = (name for name in figures if name != "version" and figures[name].replace(".", "").isdigit())
    number = {name: float(figures[name]) for name in names}
    assert number["requests_total"] == sum(number[name] for name in OUTCOMES) + unfinished
    for prefix in ("", "prefill_"):
        parts = ("hits_pin", "hits_lru", "misses")
        assert number[f"{prefix}lookups"] == sum(number[f"{prefix}{part}"] for part in parts)
    assert number.get("route_agree", 100.0) + number["swap_pct"] == 100.0


def check_all(figures: dict[str, str]) -> None:
    check(figures, unfinished=int(figures["requests_running"]) + int(figures["requests_waiting"]))


async def work(client: Client, chance: random.Random) -> None:
    """Some requests, some of them cancelled, and perhaps a sudden end."""
    for number in range(6):
        verb = chance.choice(["GEN", "CHAT"])
        route = chance.choice(["", "cache_route=1 route_j=1 "])
        client.send(f"{verb} id=r{number} {route}max={chance.choice([1, 5, 60000])} Hello")
        await client.until(f"ACK r{number}")
        client.send(f"CANCEL r{number}")
        if chance.random() < 0.1:
            client.reset()
            return
        await client.until(f"DONE r{number}")


async def test_outcomes_running_and_waiting_are_all_requests_at_every_moment(serve: Serve) -> None:
    running = await serve(max_running=2)
    clients = [await running.connect() for _ in range(6)]
    watcher = await running.connect()
    works = [asyncio.create_task(work(client, random.Random(seed))) for seed, client in enumerate(clients)]
    before: dict[str, str] = {}
    while not all(one.done() for one in works):
        figures = await watcher.stat()
        check_all(figures)
        for name in (*OUTCOMES, "requests_total", "lookups", "loads", "generated_tokens_total"):
            assert int(figures[name]) >= int(before.get(name, 0)), f"{name} went down"
        before = figures
    await asyncio.gather(*works)
    check_all(await running.figures_when(requests_running="0", requests_waiting="0"))


async def test_figures_of_all_are_the_sum_over_sessions_also_after_some_have_closed(running: Running) -> None:
    one, two, gone = [await running.connect() for _ in range(3)]
    for tokens, client in ((3, one), (5, two), (7, gone)):
        client.send(f"GEN max={tokens} Hello", "PING")
        await client.until("PONG")
    gone.send("QUIT")
    assert await gone.rest() == ["OK bye"]
    figures = await running.figures_when(sessions_current="2")
    mine, others = await one.stat("session"), await two.stat("session")
    check(mine, unfinished=0)
    assert (mine["generated_tokens_total"], others["generated_tokens_total"]) == ("3", "5")
    assert figures["generated_tokens_total"] == "15"
    assert figures["requests_length_total"] == "3"
    assert int(figures["lookups"]) > int(mine["lookups"]) + int(others["lookups"])
    summary = await one.stat("sessions")
    assert summary["~1:generated_tokens_total"] == "3"
    assert "~3:generated_tokens_total" not in summary


async def test_a_session_that_comes_back_under_its_name_starts_from_zero(serve: Serve) -> None:
    running = await serve(session_seconds=0.1)
    client = await running.connect()
    client.send("SESSION a", "GEN max=3 Hello", "QUIT")
    await client.rest()
    await running.figures_when(sessions_current="0")
    again = await running.connect()
    assert await again.ask("SESSION a") == "OK session=a new=1"
    assert (await again.stat("session"))["generated_tokens_total"] == "0"
    assert (await again.stat())["generated_tokens_total"] == "3"


async def test_stat_reset_starts_a_window_in_which_everything_still_adds_up(running: Running) -> None:
    client, worker = await running.connect(), await running.connect()
    client.send("GEN max=3 Hello", "PING")
    await client.until("PONG")
    worker.send("GEN id=a max=60000 Hello")
    await worker.until("TOK")
    assert await client.ask("STAT reset") == "RESET"
    figures = await client.stat()
    check_all(figures)
    assert (figures["requests_total"], figures["requests_length_total"]) == ("1", "0")
    assert (await client.stat("session"))["requests_total"] == "0"
    worker.send("CANCEL a")
    await worker.until("DONE")
    check_all(await running.figures_when(requests_running="0", requests_cancelled_total="1"))
    check(await worker.stat("session"), unfinished=0)


async def test_stat_answers_while_the_engine_is_in_a_long_step(running: Running) -> None:
    worker, client = await running.connect(), await running.connect()
    worker.send("GEN ids=1 max=1 " + ",".join(["5"] * 10_000))
    await worker.until("ACK")
    for _ in range(20):
        assert (await client.stat())["requests_total"] == "1"
    assert (await client.stat())["generated_tokens_total"] == "0"


async def test_the_one_line_form_tells_of_the_last_request_with_routing_words_only_when_on(
    client: Client,
) -> None:
    assert (await client.ask("STAT line")).startswith("STAT 0 0.00 0.0 ")
    client.send("GEN max=4 Hello", "STAT line", "GEN max=4 cache_route=1 Hello", "STAT line")
    await client.until("DONE")
    stock = (await client.line()).split()
    assert len(stock) == 7
    assert (stock[1], stock[6]) == ("4", "1")
    await client.until("DONE")
    routed = await client.line()
    assert " route_agree=" in routed
    assert " route_kl=" in routed


async def test_options_of_a_session_show_in_its_figures(client: Client) -> None:
    client.send("SET cache_route 1", "SET route_j 1")
    await client.line()
    await client.line()
    figures = await client.stat("session")
    assert (figures["cache_route"], figures["route_j"]) == ("1", "1")
    assert "route_agree" in figures
    assert (await client.stat("route"))["cache_route"] == "0"
    client.send("GEN max=30 Hello")
    done = await client.words("DONE")
    assert done["mode"] == "max-rank"
    assert float(done["route_agree"]) == 100 - float(done["swap_pct"])


def test_a_request_in_progress_belongs_to_the_new_window() -> None:
    counters = Counters(requests_total=5, requests_stop_total=2, requests_error_total=1, lookups=7)
    assert _without_unfinished(counters) == Counters(
        requests_total=3, requests_stop_total=2, requests_error_total=1, lookups=7
    )


def test_the_time_to_come_back_follows_the_pace_within_limits() -> None:
    pace = Pace()
    assert pace.interval_ms == 1000
    for moment in range(40):
        pace.tick(moment * 2.0)
    assert pace.interval_ms == 2000
    for _ in range(60):
        pace.tick(78.0)
    assert pace.interval_ms == 100
