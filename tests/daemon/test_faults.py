"""Faults of the daemon's own parts, and what may never be left behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coli_server.daemon.conversation import Conversation
from coli_server.engine.service import EngineService
from coli_server.protocol.commands import Command
from coli_server.settings import Address

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running, Serve


async def test_when_the_engine_dies_every_request_is_answered_and_the_daemon_ends_with_an_error(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello", "CHAT max=60000 Hello", "PING")
    await client.until("TOK 1")

    # The thread ends without a word: its loop thinks that it was asked to stop.
    monkeypatch.setattr(EngineService, "_turn", lambda *_: False)
    lines = await client.rest()
    assert any(line.startswith("ERR INTERNAL id=a ") for line in lines)
    assert any(line.startswith("ERR INTERNAL id=1 ") for line in lines)
    assert lines[-1] == "PONG"
    assert await running.ending == 1


async def test_a_step_that_fails_fails_its_requests_and_nothing_else(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.connect()
    client.send("GEN id=a max=60000 Hello")
    await client.until("TOK")

    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr("coli_server.engine.engine.Engine.step", broken)
        line = (await client.until("ERR"))[-1]
    assert line.startswith("ERR INTERNAL id=a ")
    assert "secret" not in line
    client.send("GEN id=a max=3 Hello")
    await client.until("DONE a finish=length")
    assert (await client.stat("session"))["requests_error_total"] == "1"


async def test_nothing_is_left_of_clients_that_came_and_went(running: Running) -> None:
    watcher = await running.connect()
    watcher.send("GEN max=1 Hello")  # opens the model's files
    await watcher.until("DONE")

    def left() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async def visit(number: int) -> None:
        client = await running.connect()
        client.send(f"SESSION s{number % 3}" if number % 2 else "PING")
        for words in ("GEN id=a", "CHAT id=b", "CHAT id=c"):
            client.send(f"{words}{number} max=60000 Hello")
        await client.until(f"TOK a{number}")
        match number % 4:
            case 0:
                client.reset()
            case 1:
                client.writer.close()
            case 2:
                client.send("QUIT")
                await client.rest()
            case 3:
                client.writer.write(b"GEN bytes=100\nhalf")
                client.reset()

    before = left()
    for turn in range(4):
        await asyncio.gather(*(visit(8 * turn + number) for number in range(8)))
    for _ in range(400):
        figures = await watcher.stat()
        if figures["connections_current"] == "1" and figures["requests_running"] == "0" and left() == before:
            break
        await asyncio.sleep(0.02)
    assert left() == before
    assert figures["sessions_current"] == "4"  # the three named ones and the watcher's


async def test_clients_of_other_machines_see_their_own_figures_only(running: Running) -> None:
    client = await running.connect()
    await client.ask("SESSION other")
    sent: list[bytes] = []
    stranger = Conversation(running.daemon._core, sent.append, local=False)
    for arguments in (("sessions",), ("session", "other"), ("reset",)):
        await stranger.answer(Command("STAT", arguments=arguments))
        assert sent.pop().startswith(b"ERR FORBIDDEN ")
    await stranger.answer(Command("STAT", arguments=("session",)))
    assert sent.pop().endswith(b"END\n")
    stranger.leave()


async def test_a_unix_socket_serves_the_same_protocol(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "coli.sock"
    await serve(listen=Address(path=str(path)))
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"PING\nSTAT sessions\nGEN max=1 Hello\nQUIT\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    assert (lines[0], lines[-1]) == ("PONG", "OK bye")
    assert any(line.startswith("DONE 1 finish=length") for line in lines)


async def test_a_client_that_ends_its_lines_with_crlf_is_answered_so(client: Client) -> None:
    client.writer.write(b"PING\r\nGEN max=1 Hello\r\nQUIT\r\n")
    data = await client.reader.read()
    assert data.count(b"\r\n") == data.count(b"\n") > 3
