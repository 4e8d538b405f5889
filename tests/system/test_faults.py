"""Faults that only a process of its own can have: no descriptors left, killed, told to read again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coli_client import AccessDenied, Client

PATIENCE = 30.0
OLD, NEW = "alice=" + "o" * 20, "alice=" + "n" * 20


def connect(daemon: Any) -> socket.socket:
    return socket.create_connection((daemon.host, daemon.port), timeout=PATIENCE)


def asked(one: socket.socket, command: bytes) -> bytes:
    """The first line that answers; empty when the connection was closed instead."""
    try:
        one.sendall(command)
        return one.makefile("rb").readline()
    except ConnectionError:
        return b""


def test_without_descriptors_the_daemon_goes_on_and_accepts_again_when_there_are_some(
    start_daemon: Any, endless_model: Path
) -> None:
    with start_daemon("--model", str(endless_model), "--max-connections", "4096") as daemon:
        kept = connect(daemon)
        assert asked(kept, b"GEN max=1 Hello\n").startswith(b"ACK")
        pid = daemon.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 8, hard))
        crowd = [connect(daemon) for _ in range(40)]  # the kernel accepts them; the daemon cannot
        for one in crowd:
            with contextlib.suppress(ConnectionError):
                one.sendall(b"PING\n")
        fresh = connect(daemon)
        assert asked(kept, b"PING\n")  # rest of the answer to GEN, or PONG
        for one in crowd:
            one.close()
        deadline = time.monotonic() + PATIENCE
        while asked(fresh, b"GEN max=1 Hello\n")[:3] != b"ACK":
            assert time.monotonic() < deadline
            fresh.close()
            time.sleep(0.1)
            fresh = connect(daemon)
        assert daemon.stop() == 0


def test_killed_and_started_again_on_the_same_port_and_socket(
    start_daemon: Any, endless_model: Path, tmp_path: Path
) -> None:
    sessions = str(tmp_path / "sessions")
    flags = ("--model", str(endless_model), "--session-dir", sessions)
    with start_daemon(*flags) as first:
        place = first.address
        client = connect(first)
        client.sendall(b"SESSION s\nCHAT max=2 Hello\nGEN max=60000 Hello\n")
        lines = client.makefile("rb")
        while not lines.readline().startswith(b"ACK 2"):
            pass
        first.process.kill()
        assert lines.read() is not None  # the connection ended; what it still held does not matter
        assert first.process.wait(PATIENCE) == -signal.SIGKILL
    with start_daemon(*flags, "--listen", place) as second, Client(second.host, second.port) as again:
        assert not again.session("s").new
        assert again.chat("Go on", max=2).wait().tokens == 2


def test_sighup_reads_tokens_and_log_level_again_and_a_mistake_changes_nothing(
    start_daemon: Any, endless_model: Path, tmp_path: Path
) -> None:
    tokens, config = tmp_path / "tokens", tmp_path / "coli.conf"
    tokens.write_text(OLD)
    config.write_text(f"# ours\nCOLI_TOKEN_FILE={tokens}\nCOLI_LOG_LEVEL='info'\nCOLI_LOG_FORMAT=json\n")

    def until(daemon: Any, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not any(text in line for line in list(daemon.log)):
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.02)

    with start_daemon("--model", str(endless_model), "--config", str(config)) as daemon:
        old, new = OLD.split("=")[1], NEW.split("=")[1]
        with Client(daemon.host, daemon.port, token=old) as client:
            client.generate("Hello", max=1).wait()
            until(daemon, '"logger": "coli.access"')
            tokens.write_text("alice=short")
            daemon.process.send_signal(signal.SIGHUP)
            until(daemon, "not read again")
            client.ping()
            tokens.write_text(NEW)
            config.write_text(config.read_text().replace("'info'", "error"))
            daemon.process.send_signal(signal.SIGHUP)
            with contextlib.suppress(Exception):
                while True:
                    client.stat()
        with pytest.raises(AccessDenied):
            Client(daemon.host, daemon.port, token=old).connect()
        with Client(daemon.host, daemon.port, token=new) as client:
            before = len(daemon.log)
            client.generate("Hello", max=1).wait()
        assert daemon.stop() == 0
        assert not [line for line in daemon.log[before:] if "coli.access" in line]
        assert not [line for line in daemon.log if old in line or new in line]


@contextlib.contextmanager
def activated(model: Path, environment: Mapping[str, str]) -> Iterator[tuple[Any, socket.socket, Any]]:
    """A daemon with a socket and a mailbox from its supervisor, as systemd would start it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox,
    ):
        mailbox.bind(f"\0coli-{os.getpid()}")
        mailbox.settimeout(PATIENCE)
        code = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid());"
            "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        serve = [*["-P", "-m", "coli_server.cli", "serve", "--log-level", "error", "--model"], str(model)]
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno()), *serve],
            env={
                **environment,
                "NOTIFY_SOCKET": f"@coli-{os.getpid()}",
                "WATCHDOG_USEC": "10000000",
                "LISTEN_FDS": "1",
            },
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process, mailbox, listener.getsockname()
        finally:
            process.kill()
            process.wait()


def test_a_supervisor_hands_over_the_socket_and_hears_how_it_goes(
    endless_model: Path, clean_environment: Mapping[str, str]
) -> None:
    with activated(endless_model, clean_environment) as (process, mailbox, place):
        with socket.create_connection(place, timeout=PATIENCE) as early:  # before the daemon can serve
            assert asked(early, b"PING\n") == b"PONG\n"
        assert mailbox.recv(4096).startswith(b"READY=1\nSTATUS=serving endless on 127.0.0.1:")
        assert mailbox.recv(4096) == b"WATCHDOG=1"
        process.terminate()
        messages = []
        while not messages or not messages[-1].startswith(b"STOPPING=1"):
            messages.append(mailbox.recv(4096))
        assert process.wait(PATIENCE) == 0


def take_terminal() -> None:
    """Make standard input the terminal of a session of this process's own."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_daemon_in_a_terminal_ends_with_it(
    endless_model: Path, clean_environment: Mapping[str, str]
) -> None:
    master, terminal = os.openpty()
    serve = ["-P", "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0", "--model"]
    process = subprocess.Popen(
        [sys.executable, *serve, str(endless_model)],
        env=clean_environment,
        stdin=terminal,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    assert process.stderr is not None
    with process.stderr:
        while not process.stderr.readline().startswith("READY"):
            assert process.poll() is None
        os.close(master)
        assert process.wait(PATIENCE) == 0
