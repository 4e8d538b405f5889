"""Every limit refuses what is over it, counts that, and lets the rest go on."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from coli_server.engine.memory import plan_memory
from coli_server.engine.model import Checkpoint
from coli_server.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemon.conftest import Running, Serve


async def test_connections_of_one_address_are_limited_and_come_free_again(serve: Serve) -> None:
    running = await serve(connections_per_address=2)
    first, second = await running.connect(), await running.connect()
    assert await first.ask("PING") == await second.ask("PING") == "PONG"
    third = await running.connect()
    assert (await third.rest())[-1].startswith("ERR TOO_MANY_CLIENTS 2 connections from 127.0.0.1 ")
    figures = await first.stat()
    assert figures["connections_rejected_total"] == figures["connections_rejected_address_total"] == "1"
    assert figures["connections_current"] == "2"
    second.send("QUIT")
    await second.rest()
    for _ in range(200):
        if (await first.stat())["connections_current"] == "1":
            break
        await asyncio.sleep(0.01)
    assert await (await running.connect()).ask("PING") == "PONG"


async def test_requests_of_one_session_are_limited_over_all_its_connections(serve: Serve) -> None:
    running = await serve(requests_per_session=2, requests_per_connection=8)
    one, other = await running.connect(), await running.connect()
    for client in (one, other):
        await client.ask("SESSION s")
    one.send("GEN id=a max=60000 Hello", "GEN id=b max=60000 Hello")
    await one.until("ACK b")
    assert (await other.ask("GEN id=c Hello")).startswith("ERR BUSY id=c retry_ms=")
    figures = await running.figures_when(busy_session_total="1")
    assert figures["busy_connection_total"] == "0"


async def test_a_request_that_waits_too_long_in_the_queue_ends_as_past_its_deadline(serve: Serve) -> None:
    running = await serve(max_running=1, queue_seconds=0.2)
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello", "GEN id=b max=3 Hello")
    line = (await client.until("DONE b"))[-1]
    assert line.startswith("DONE b finish=deadline tokens=0 ")
    figures = await running.figures_when(queue_timeouts_total="1")
    assert (figures["requests_running"], figures["requests_deadline_total"]) == ("1", "1")


async def test_lines_payloads_and_halves_are_counted(serve: Serve) -> None:
    running = await serve(line_bytes=256, payload_bytes=16, half_command_seconds=0.1, idle_seconds=0.3)
    client = await running.connect()
    client.send("GEN " + "x" * 300, "GEN bytes=20", "y" * 20, "NOPE")
    assert len([line for line in [await client.line() for _ in range(3)] if line.startswith("ERR ")]) == 3
    client.writer.write(b"half a")
    assert (await client.rest())[-1].startswith("ERR TIMEOUT half a line")
    idle = await running.connect()
    assert (await idle.rest())[-1].startswith("ERR TIMEOUT nothing")
    figures = await (await running.connect()).stat()
    names = (
        "protocol_errors",
        "lines_too_long",
        "payloads_too_large",
        "half_command_timeouts",
        "idle_timeouts",
    )
    assert [figures[f"{name}_total"] for name in names] == ["3", "1", "1", "1", "1"]


async def test_sessions_that_make_room_expire_or_find_none_are_counted(serve: Serve) -> None:
    running = await serve(max_sessions=1, session_seconds=0.3)
    client = await running.connect()
    await client.ask("SESSION a")
    assert (await (await running.connect()).ask("SESSION b")).startswith("ERR BUSY ")
    client.send("QUIT")
    await client.rest()
    other = await running.connect()
    for _ in range(200):
        if (await other.ask("SESSION b")) == "OK session=b new=1":
            break
        await asyncio.sleep(0.005)
    other.send("QUIT")
    await other.rest()
    figures = await running.figures_when(sessions_expired_total="1")
    assert (figures["sessions_evicted_total"], figures["sessions_current"]) == ("1", "0")
    assert int(figures["sessions_refused_total"]) >= 1


async def test_a_full_queue_and_a_busy_connection_are_counted(serve: Serve) -> None:
    running = await serve(max_running=1, queue_length=1, requests_per_connection=3)
    client = await running.connect()
    client.send(*[f"GEN id={id} max=60000 Hello" for id in "abc"])
    assert (await client.until("ERR BUSY id=c"))[-1]
    assert (await running.figures_when(busy_queue_total="1"))["busy_connection_total"] == "0"


def test_kv_ram_is_what_all_requests_share_and_too_little_is_refused(endless_model: Path) -> None:
    checkpoint = Checkpoint.open(endless_model)
    plan = plan_memory(checkpoint, 2 << 30, 6, None, 256, kv_ram=1 << 20)
    assert plan.kv_bytes == 1 << 20
    assert plan.context_length == (1 << 20) // plan.kv_token_bytes
    with pytest.raises(ConfigurationError, match="--kv-ram=1024 "):
        plan_memory(checkpoint, 2 << 30, 6, None, 256, kv_ram=1024)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "coli.access"]


async def test_each_request_has_one_access_line_with_its_figures(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = await running.connect()
    client.send("GEN id=a max=3 Hello", "GEN id=b max=60000 Hello")
    await client.until("TOK b")
    client.send("CANCEL b", 'SCORE id=c {"context": "Hello", "continuation": " world"}')
    await client.until("DONE c")
    client.send("GEN id=d ids=1 999999", "PING")
    await client.until("PONG")
    lines = {line["id"]: line for line in access_lines(caplog)}
    assert len(lines) == len(access_lines(caplog)) == 4
    assert [lines[id]["outcome"] for id in "abcd"] == ["length", "cancelled", "stop", "BAD_REQUEST"]
    assert len({line["request"] for line in lines.values()}) == 4
    assert (lines["a"]["tokens"], lines["a"]["session"], lines["a"]["verb"]) == (3, "~1", "GEN")
    assert lines["a"]["total_ms"] >= lines["a"]["ttft_ms"] > 0
    assert lines["a"]["lookups"] > 0
    assert all("prompt" not in line for line in lines.values())


async def test_texts_are_logged_only_where_it_is_asked_for(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = await serve(log_prompts=True)
    client = await running.connect()
    client.send("GEN max=3 Hello there")
    lines = await client.until("DONE")
    (line,) = access_lines(caplog)
    answer = "".join(json.loads(word.split(" ", 2)[2]) for word in lines if word.startswith("TOK"))
    assert (line["prompt"], line["answer"]) == ("Hello there", answer)
