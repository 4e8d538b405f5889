"""`coli top` and `coli stat --watch` in real terminals: of tmux where there is one, and bare ones."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from coli_client import Client
from support.ports import free_port

if TYPE_CHECKING:
    from tests.system.conftest import Daemon, StartDaemon

PATIENCE = 30.0
TOP = [sys.executable, "-P", "-m", "coli_server.cli", "top", "--interval", "0.2", "--connect"]


SERVED = ("--ram", "2G", "--experts-per-layer", "6")


def free_place() -> str:
    return f"127.0.0.1:{free_port()}"


class Terminal(Protocol):
    def press(self, key: str) -> None: ...
    def resize(self, width: int, height: int) -> None: ...
    def screen(self) -> str: ...
    def over(self) -> bool: ...


class Tmux:
    """A terminal of tmux: `screen` is what a person would see, line by line."""

    def __init__(self, folder: Path, command: list[str], env: Mapping[str, str]) -> None:
        self._socket = str(folder / "tmux")
        variables = [f"{name}={env[name]}" for name in env if name.startswith(("COLI_", "PATH", "HOME"))]
        words = shlex.join(["env", "LC_ALL=C.UTF-8", *variables, *command])
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", words)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-u", "-S", self._socket, *words], capture_output=True, text=True)
        return done.stdout

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def over(self) -> bool:
        return not self._tmux("list-sessions")

    def close(self) -> None:
        self._tmux("kill-server")


class BarePty:
    """A pseudo terminal: `screen` is what was written after the cursor went home for the last time."""

    def __init__(self, folder: Path, command: list[str], env: Mapping[str, str]) -> None:  # noqa: ARG002
        self._master, slave = pty.openpty()
        self.resize(80, 24)
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(slave)
        self._output = b""

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if hasattr(self, "_process"):
            self._process.send_signal(signal.SIGWINCH)

    def screen(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self._output += os.read(self._master, 65_536)
            except OSError:
                break
        frame = self._output.rsplit(b"\x1b[H", 1)[-1].decode("utf-8", "replace")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r", "")

    def over(self) -> bool:
        self.screen()
        return self._process.poll() is not None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)


OpenTerminal = Callable[..., Terminal]
KINDS = [*([Tmux] if shutil.which("tmux") else []), BarePty]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def open_terminal(
    request: pytest.FixtureRequest, tmp_path: Path, clean_environment: Mapping[str, str]
) -> Iterator[OpenTerminal]:
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> Terminal:
            terminal = request.param(tmp_path, list(command), clean_environment)
            stack.callback(terminal.close)
            return terminal

        yield start


def wait(condition: Callable[[], object], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def shows(terminal: Terminal, pattern: str) -> None:
    wait(
        lambda: re.search(pattern, terminal.screen(), re.MULTILINE),
        lambda: f"{pattern}:\n{terminal.screen()}",
    )


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, small_model: Path) -> Iterator[Daemon]:
    with start_daemon("--model", str(small_model), *SERVED) as daemon:
        yield daemon


def test_top_shows_sorts_resizes_and_quits(daemon: Daemon, open_terminal: OpenTerminal) -> None:
    with Client(daemon.host, daemon.port) as one, Client(daemon.host, daemon.port) as two:
        one.session("less")
        one.generate("x", max=3).wait()
        two.session("more")
        two.generate("x", max=9).wait()
        terminal = open_terminal(*TOP, daemon.address)
        shows(terminal, r"mode  stock routing")
        shows(terminal, r"experts +.*MiB of|experts +.*KiB of")
        shows(terminal, r"layers +\d+-\d+/\d+")
        shows(terminal, r"(?s)^more .*^less ")
        terminal.press("n")
        shows(terminal, r"(?s)^less .*^more ")
        terminal.resize(132, 40)
        shows(terminal, r"^session.{90,}swap %")
        terminal.resize(60, 12)
        shows(terminal, r"\Acoli .*(\n.*){10}\nq quit")
        terminal.press("q")
        wait(terminal.over, terminal.screen)


@pytest.mark.parametrize("open_terminal", KINDS[:1], indirect=True)
def test_top_and_stat_watch_go_on_over_restarts_of_the_daemon(
    start_daemon: StartDaemon,
    small_model: Path,
    clean_environment: Mapping[str, str],
    open_terminal: OpenTerminal,
) -> None:
    place = free_place()
    flags = (*SERVED, "--model", str(small_model), "--listen", place)
    command = [sys.executable, "-P", "-m", "coli_server.cli", "stat", "server", "--json", "--watch=0.1"]
    terminal = open_terminal(*TOP, place)
    shows(terminal, r"\Ano answer from 127.0.0.1:")
    with contextlib.ExitStack() as stack:
        with start_daemon(*flags) as first:
            shows(terminal, r"(?s)\Acoli .*mode  stock routing")
            watch = subprocess.Popen(
                [*command, "--connect", place],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=dict(clean_environment),
            )
            stack.callback(watch.wait)
            stack.callback(watch.kill)
            assert watch.stdout is not None
            assert watch.stderr is not None
            assert json.loads(watch.stdout.readline())["pid"] == first.process.pid
        assert watch.stderr.readline().endswith("; trying again\n")
        shows(terminal, r"\Ano answer from 127.0.0.1:")
        with start_daemon(*flags, CACHE_ROUTE="1") as second:
            pids = (json.loads(line)["pid"] for line in watch.stdout)
            assert next(pid for pid in pids if pid != first.process.pid) == second.process.pid
            shows(terminal, r"(?s)\Acoli .*mode  cache-aware routing")
    terminal.press("q")
    wait(terminal.over, terminal.screen)
