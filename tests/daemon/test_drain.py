"""The end of a daemon: what runs is finished, what is new is refused, nobody is forgotten."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.daemon.conftest import Running, Serve


async def test_an_idle_daemon_stops_at_once_and_says_goodbye_by_closing(running: Running) -> None:
    client = await running.connect()
    assert await client.ask("PING") == "PONG"
    running.signal()
    assert await client.rest() == []
    assert await running.ending == 0


async def test_what_runs_is_finished_and_new_work_is_refused(serve: Serve) -> None:
    running = await serve(drain_seconds=30.0)
    client, other = await running.connect(), await running.connect()
    client.send("GEN id=a max=600 Hello", "CHAT id=b max=300 Hello", "CHAT id=c max=300 Hello")
    await client.until("TOK b")
    running.signal()
    await running.figures_when(draining="1")
    assert (await other.ask("GEN id=x Hello")).startswith("ERR DRAINING id=x ")
    late = await running.connect()
    assert (await late.ask("CHAT Hello")).startswith("ERR DRAINING ")
    lines = await client.rest()
    assert any(line.startswith("DONE a finish=length tokens=600 ") for line in lines)
    assert any(line.startswith("DONE b finish=length tokens=300 ") for line in lines)
    assert any(line.startswith("ERR DRAINING id=c ") for line in lines)
    assert await running.ending == 0


async def test_after_the_drain_time_what_runs_or_waits_is_ended_as_drained(serve: Serve) -> None:
    running = await serve(drain_seconds=0.1, max_running=1)
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello", "GEN id=b max=60000 Hello")
    await client.until("ACK b")
    running.signal()
    done = [line for line in await client.rest() if line.startswith("DONE")]
    assert [line.split()[:3] for line in done] == [
        ["DONE", "a", "finish=drained"],
        ["DONE", "b", "finish=drained"],
    ]
    assert await running.ending == 0


async def test_a_second_signal_ends_a_drain_at_once(serve: Serve) -> None:
    running = await serve(drain_seconds=1000.0)
    client = await running.connect()
    client.send("GEN max=60000 Hello")
    await client.until("TOK")
    running.signal()
    running.signal()
    assert await running.ending == 128 + signal.SIGTERM
