"""An engine whose step does not end, and one that fails in any of its stages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from coli_server.daemon.health import Health, Watchdog
from coli_server.engine import Engine

if TYPE_CHECKING:
    from tests.daemon.conftest import Running, Serve


class Hanging:
    """Steps of the engine wait while `gate` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        step = Engine.step

        def waiting(engine: Engine, *args: Any) -> Any:
            self.gate.wait()
            return step(engine, *args)

        monkeypatch.setattr(Engine, "step", waiting)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(monkeypatch)
    yield made
    made.gate.set()


async def until_ready(running: Running, ready: bool) -> None:
    for _ in range(2000):
        if running.daemon.health.ready == ready:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(running.daemon.health)


async def test_a_step_that_hangs_fails_what_runs_and_turns_readiness_off_until_it_ends(
    serve: Serve, hanging: Hanging
) -> None:
    running = await serve(step_seconds=0.3, step_exit_seconds=0.0)
    assert running.daemon.health.ready
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello")
    await client.until("TOK")
    hanging.gate.clear()
    client.send("GEN id=b max=3 Hello")
    lines = await client.until("ERR INTERNAL id=b ")
    assert any(line.startswith("ERR INTERNAL id=a ") for line in lines)
    assert not running.daemon.health.ready
    assert running.daemon.health.live
    assert (await client.ask("GEN id=c Hello")).startswith("ERR BUSY id=c retry_ms=")
    assert await client.ask("PING") == "PONG"
    figures = await client.stat()
    assert (figures["engine_stalled"], figures["engine_stalls_total"]) == ("1", "1")
    assert figures["requests_error_total"] == "2"

    hanging.gate.set()
    await until_ready(running, True)
    client.send("GEN id=d max=3 Hello")
    await client.until("DONE d finish=length")
    figures = await client.stat()
    assert (figures["engine_stalled"], figures["requests_running"]) == ("0", "0")
    assert figures["requests_total"] == "3"


async def test_a_step_that_hangs_for_too_long_ends_the_daemon_with_an_error(
    serve: Serve, hanging: Hanging
) -> None:
    running = await serve(step_seconds=0.3, step_exit_seconds=0.3)
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello")
    await client.until("TOK")
    hanging.gate.clear()
    lines = await client.rest()
    assert lines[-1].startswith("ERR INTERNAL id=a ")
    assert await running.ending == 1
    assert not running.daemon.health.live


def test_time_in_which_nobody_worked_is_not_held_against_the_engine() -> None:
    watchdog = Watchdog(limit=5.0, patience=5.0)
    for _ in range(100):
        watchdog.look(0.25, busy=False, heartbeat=1.0)
    assert not watchdog.stalled
    watchdog.look(3600.0, busy=True, heartbeat=1.0)  # the process itself was stopped for an hour
    assert not watchdog.stalled
    for _ in range(100):
        watchdog.look(0.25, busy=True, heartbeat=1.0)
    assert watchdog.stalled
    assert watchdog.hopeless
    watchdog.look(0.25, busy=True, heartbeat=2.0)
    assert (watchdog.stalled, watchdog.hopeless) == (False, False)


def test_without_limits_the_watch_waits_for_ever() -> None:
    watchdog = Watchdog(limit=0.0, patience=1.0)
    for _ in range(100_000):
        watchdog.look(1.0, busy=True, heartbeat=1.0)
    assert (watchdog.stalled, watchdog.hopeless) == (False, False)


def test_health_says_why_in_order_of_importance() -> None:
    health = Health()
    assert (health.ready, health.reason) == (False, "starting")
    health.started = True
    assert (health.ready, health.live, health.reason) == (True, True, "ok")
    health.draining = True
    assert (health.ready, health.live, health.reason) == (False, True, "draining")
    health.stalled = True
    assert (health.ready, health.live, health.reason) == (False, True, "the engine stands still")
    health.failed = True
    assert (health.ready, health.live, health.reason) == (False, False, "the engine has failed")


class Panic(BaseException):
    """As native code raises it: no Exception."""


STAGES = {
    "tokenise": ("coli_server.engine.text.Text.encode", RuntimeError),
    "tokenise, in native code": ("coli_server.engine.text.Text.encode", Panic),
    "template": ("coli_server.engine.text.Text.encode_chat", RuntimeError),
    "admit": ("coli_server.engine.retained.KvStore.take", MemoryError),
    "begin": ("coli_server.engine.engine.Engine.new_sequence", RuntimeError),
    "prefill and decode": ("coli_server.engine.engine.Engine.step", RuntimeError),
    "sample": ("coli_server.engine.sampler.Sampler.choose", RuntimeError),
    "detokenise": ("coli_server.engine.generation.Generation._chunk", RuntimeError),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_fault_in_a_stage_fails_its_request_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    place, kind = STAGES[stage]
    client = await running.connect()

    def broken(*_: Any) -> None:
        raise kind("secret detail")

    verb = "CHAT" if stage == "template" else "GEN"
    with monkeypatch.context() as patch:
        patch.setattr(place, broken)
        client.send(f"{verb} id=a max=3 Hello")
        line = (await client.until("ERR"))[-1]
    assert line.startswith("ERR INTERNAL id=a ")
    assert "secret" not in line
    client.send(f"{verb} id=b max=3 Hello")
    await client.until("DONE b finish=length")
    figures = await client.stat()
    assert (figures["requests_running"], figures["requests_waiting"]) == ("0", "0")
    ended = sum(int(figures[f"requests_{way}_total"]) for way in ("length", "error"))
    assert int(figures["requests_total"]) == ended


async def test_a_fault_while_a_cancelled_request_is_ended_fails_it_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello")
    await client.until("TOK")

    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr("coli_server.engine.generation.Generation.end", broken)
        client.send("CANCEL a")
        await client.until("ERR INTERNAL id=a ")
    client.send("GEN id=b max=3 Hello")
    await client.until("DONE b finish=length")


async def test_a_request_has_left_the_queue_before_its_first_step_is_over(
    serve: Serve, hanging: Hanging
) -> None:
    running = await serve()
    client = await running.connect()
    hanging.gate.clear()
    client.send("GEN id=a max=1 Hello")
    figures = await running.figures_when(requests_running="1")
    assert (figures["requests_waiting"], figures["prompt_tokens_total"]) == ("0", "3")
    hanging.gate.set()
    await client.until("DONE a")
