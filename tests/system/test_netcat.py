"""What people have at hand: three netcats, each where it is installed, and always a plain socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = b"GEN max=40 Hello\nCHAT max=40 id=x Hello\nSTAT session\n"

Talk = Callable[[str, int, bytes], bytes]


def plain_socket(host: str, port: int, script: bytes) -> bytes:
    with socket.create_connection((host, port), timeout=30) as one:
        one.sendall(script)
        one.shutdown(socket.SHUT_WR)
        return one.makefile("rb").read()


def netcat(*command: str) -> Talk:
    def talk(host: str, port: int, script: bytes) -> bytes:
        done = subprocess.run([*command, host, str(port)], input=script, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return talk


# As they behave by default and with the flag that ends the sending side when standard input ends.
COMMANDS = {
    "openbsd": ("nc.openbsd",),
    "openbsd -N": ("nc.openbsd", "-N"),
    "traditional": ("nc.traditional",),
    "traditional -q": ("nc.traditional", "-q", "30"),
    "nmap": ("ncat",),
    "nmap --no-shutdown": ("ncat", "--no-shutdown"),
}
TALKS: dict[str, Talk] = {"a plain socket": plain_socket}
TALKS |= {name: netcat(*command) for name, command in COMMANDS.items() if shutil.which(command[0])}


@pytest.fixture(scope="module")
def daemon(start_daemon: Any, small_model: Any) -> Any:
    with start_daemon("--model", str(small_model)) as started:
        yield started


@pytest.mark.parametrize("name", TALKS)
def test_everything_comes_back(daemon: Any, name: str) -> None:
    # Those that do not end their sending side need to be told that it is over.
    script = SCRIPT + (b"" if name in ("a plain socket", "openbsd -N", "nmap") else b"QUIT\n")
    if name in ("openbsd", "traditional", "traditional -q", "nmap --no-shutdown"):
        script = script.replace(b" id=x", b"")  # QUIT cancels what runs beside
    lines = TALKS[name](daemon.host, daemon.port, script).decode().splitlines()
    ends = [line.split()[2] for line in lines if line.startswith("DONE")]
    assert ends == ["finish=length"] * 2
    assert "STAT generated_tokens_total" in "\n".join(lines)


@pytest.mark.parametrize("name", TALKS)
def test_a_browser_or_a_tls_client_is_told_that_it_is_wrong_here(daemon: Any, name: str) -> None:
    for script in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01"):
        assert TALKS[name](daemon.host, daemon.port, script).startswith(b"ERR HTTP ")
