"""What a supervisor is told, and the sockets that it hands over."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coli_server.daemon.supervisor import Notifier, inherited_sockets
from coli_server.engine import Engine

if TYPE_CHECKING:
    from tests.daemon.conftest import Serve


@pytest.fixture
def mailbox(tmp_path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(tmp_path / "notify"))
        one.setblocking(False)
        yield one


def told(mailbox: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(mailbox.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_each_message_says_what_systemd_reads(mailbox: socket.socket) -> None:
    environ = {
        "NOTIFY_SOCKET": mailbox.getsockname(),
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    notifier = Notifier(environ)
    assert environ == {}, "a child must not speak for the service"
    notifier.ready("serving")
    notifier.status("draining")
    for now in (100.0, 100.1, 107.4, 107.5, 108.0):  # a quarter of the watchdog's time is 7.5 seconds
        notifier.alive(now)
    notifier.stopping("bye")
    assert told(mailbox) == [
        "READY=1\nSTATUS=serving",
        "STATUS=draining",
        "WATCHDOG=1",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=bye",
    ]


def test_a_name_in_the_abstract_namespace_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(f"\0coli-test-{os.getpid()}")
        one.setblocking(False)
        Notifier({"NOTIFY_SOCKET": f"@coli-test-{os.getpid()}"}).status("well")
        assert told(one) == ["STATUS=well"]


def test_a_supervisor_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).status("well")
    Notifier({}).ready("nobody listens")


@pytest.mark.parametrize("watchdog", [{"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, {}])
def test_without_a_watchdog_of_its_own_the_process_sends_no_beats(
    mailbox: socket.socket, watchdog: dict[str, str]
) -> None:
    Notifier({"NOTIFY_SOCKET": mailbox.getsockname(), **watchdog}).alive(100.0)
    assert told(mailbox) == []


async def test_the_heartbeat_reaches_the_supervisor_and_stops_with_the_engine(
    serve: Serve, mailbox: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, step = threading.Event(), Engine.step

    def waiting(engine: Engine, *args: Any) -> Any:
        gate.wait()
        return step(engine, *args)

    monkeypatch.setattr(Engine, "step", waiting)
    environ = {"NOTIFY_SOCKET": mailbox.getsockname(), "WATCHDOG_USEC": "1000000"}
    running = await serve(notifier=Notifier(environ), step_seconds=0.3, step_exit_seconds=0.0)
    client = await running.connect()
    client.send("GEN max=1 Hello")
    await client.until("ERR INTERNAL")
    messages = told(mailbox)
    assert messages.count("WATCHDOG=1") >= 1
    assert messages[-1] == "STATUS=the engine stands still"
    await asyncio.sleep(0.6)  # two beats of the loop
    assert told(mailbox) == []
    gate.set()
    await running.stop()
    assert "STOPPING=1\nSTATUS=draining" in told(mailbox)


def test_sockets_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "coli"}
    assert inherited_sockets(environ) == []
    assert environ == {}
