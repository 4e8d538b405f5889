"""Two daemons behind a real HAProxy with the configuration of deploy/: sessions stick to their daemon."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coli_client import Client, ColiError
from support.ports import free_port

if TYPE_CHECKING:
    from tests.system.conftest import Daemon, StartDaemon

CONFIG = Path(__file__).resolve().parents[2] / "deploy/haproxy/haproxy.cfg"
NAMES = [f"person-{number}" for number in range(12)]


@dataclass(frozen=True)
class Proxy:
    """Daemons by their process id, behind `port`."""

    port: int
    daemons: dict[int, Daemon]

    def pid(self, session: str | None = None) -> int:
        """The process that a new connection reaches, which asks for `session` first."""
        with Client("127.0.0.1", self.port) as client:
            if session is not None:
                client.session(session)
            return int(client.stat("server")["pid"])


@pytest.fixture(scope="module")
def proxy(
    start_daemon: StartDaemon, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    ports = {number: free_port() for number in (7310, 7311, 7312, 9311, 9312)}
    text = CONFIG.read_text("utf-8")
    for number, port in ports.items():
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{port}").replace(
            f"port {number}", f"port {port}"
        )
    config = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
    config.write_text(text.replace("inter 2s", "inter 100ms"))

    def serve(number: int) -> AbstractContextManager[Daemon]:
        place, metrics = f"127.0.0.1:{ports[7310 + number]}", str(ports[9310 + number])
        flags = ("--model", str(small_model), "--ram", "2G", "--experts-per-layer", "6")
        return start_daemon(*flags, "--listen", place, "--metrics-port", metrics)

    with serve(1) as one, serve(2) as two:
        haproxy = subprocess.Popen(["haproxy", "-f", str(config)])
        try:
            found = Proxy(ports[7310], {daemon.process.pid: daemon for daemon in (one, two)})
            wait_for(found)
            yield found
        finally:
            haproxy.terminate()
            haproxy.wait(60)


def wait_for(proxy: Proxy) -> None:
    for _ in range(300):
        with contextlib.suppress(ColiError):
            proxy.pid()
            return
        time.sleep(0.1)
    pytest.fail("the proxy does not answer")


def test_sessions_stick_to_a_daemon_and_all_daemons_get_some(proxy: Proxy) -> None:
    first = {name: proxy.pid(name) for name in NAMES}
    assert set(first.values()) == proxy.daemons.keys()
    assert {name: proxy.pid(name) for name in reversed(NAMES)} == first


def test_a_dialogue_goes_on_over_another_connection(proxy: Proxy) -> None:
    for _ in range(3):
        with Client("127.0.0.1", proxy.port) as client:
            client.session(NAMES[0])
            client.chat("hello", max=2).wait()
    with Client("127.0.0.1", proxy.port) as client:
        assert client.session(NAMES[0]).new is False
        assert client.stat("session")["requests_total"] == "3"


def test_connections_without_a_session_are_spread(proxy: Proxy) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client("127.0.0.1", proxy.port)) for _ in range(4)]
        assert {int(client.stat("server")["pid"]) for client in clients} == proxy.daemons.keys()


def test_when_a_daemon_goes_only_its_own_sessions_move(proxy: Proxy) -> None:
    before = {name: proxy.pid(name) for name in NAMES}
    gone = before[NAMES[0]]
    (left,) = proxy.daemons.keys() - {gone}
    with Client("127.0.0.1", proxy.port) as client:
        client.session(NAMES[0])
        answer = client.generate("x", max=5)
        proxy.daemons[gone].process.terminate()
        assert answer.wait().tokens == 5  # it drains: what runs there comes to its end through the proxy
    proxy.daemons[gone].process.wait(60)
    assert {name: proxy.pid(name) for name in NAMES} == dict.fromkeys(NAMES, left)
