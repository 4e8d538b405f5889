"""`coli gen`, `coli chat` and `coli stat` against real daemons, private ones and running ones."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

STOCK = r"\d+ tok \| [\d.]+ tok/s \| hit [\d.]+% \(pin [\d.]+ \+ lru [\d.]+\)"
FOOTER = STOCK + r" \| swap ([\d.]+)% \((\d+)/(\d+)\) \| route_agree ([\d.]+)% \| route_kl ([\d.]+)"


class Output(Protocol):
    status: int
    out: str
    err: str


class RunColi(Protocol):
    def __call__(self, *words: str, input: str = "", **variables: str) -> Output: ...


class Daemon(Protocol):
    address: str
    process: subprocess.Popen[str]

    def stop(self) -> int: ...


class StartDaemon(Protocol):
    def __call__(self, *flags: str, **variables: str) -> AbstractContextManager[Daemon]: ...


StartChat = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def start_chat(clean_environment: Mapping[str, str]) -> StartChat:
    def start(*flags: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "coli_server.cli", "chat", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean_environment, **variables},
            # Where the tests run in the background of a shell, Ctrl-C is ignored from the start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, small_model: Path) -> Iterator[Daemon]:
    with start_daemon("--model", str(small_model), "--experts-per-layer", "8", "--context", "4096") as daemon:
        yield daemon


def test_gen_with_a_private_daemon_prints_text_and_figures_apart(
    run_coli: RunColi, small_model: Path
) -> None:
    done = run_coli("gen", "Once upon", "--max", "8", "--model", str(small_model))
    assert done.status == 0
    assert done.out.strip()
    assert re.fullmatch(STOCK + r" \| stock routing\n", done.err)


def test_gen_says_the_same_whoever_serves_it(run_coli: RunColi, small_model: Path, daemon: Daemon) -> None:
    private = run_coli("gen", "Once upon", "--max=8", "--model", str(small_model))
    attached = run_coli("gen", "Once upon", "--max=8", "--connect", daemon.address)
    piped = run_coli("gen", "-", "--max=8", "--connect", daemon.address, input="Once upon\n")
    assert private.out == attached.out == piped.out


def test_gen_takes_routing_from_variables_and_flags_and_sends_it(run_coli: RunColi, daemon: Daemon) -> None:
    words = (
        "gen",
        "--max",
        "64",
        "--connect",
        daemon.address,
        "--route-j",
        "0",
        "--cache-route",
        "Once upon",
    )
    done = run_coli(*words, ROUTE_M="16")
    assert done.status == 0, done.err
    match = re.fullmatch(FOOTER + "\n", done.err)
    assert match
    swap, swaps, slots, agree, kl = match.groups()
    assert int(slots) == 63 * 2 * 4  # steps x layers with experts x experts of a token
    assert int(swaps) > 0
    assert float(swap) == pytest.approx(100 * int(swaps) / int(slots), abs=0.051)
    assert float(agree) == pytest.approx(100 - float(swap), abs=0.101)
    assert float(kl) > 0


def test_a_setting_of_private_daemons_is_refused_with_connect(run_coli: RunColi, daemon: Daemon) -> None:
    done = run_coli("gen", "text", "--connect", daemon.address, "--ram", "1G")
    assert done.status == 2
    assert done.err == "coli: --ram is a setting of a private daemon: it has no effect with --connect\n"


def test_a_request_that_is_refused_is_one_line_and_status_1(run_coli: RunColi, daemon: Daemon) -> None:
    done = run_coli("gen", "", "--connect", daemon.address)
    assert done.status == 1
    assert done.err.startswith("coli: BAD_REQUEST: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gen", "a", *("--stop=x",) * 5), "stop has 5 strings; at most 4 are allowed"),
        (("gen", "a", "--session", "a b"), "id='a b' must be 1 to 64 of letters"),
        (("gen", "\udcff"), "prompt holds half a surrogate pair"),
        (("stat", "line"), "section 'line' is not a table"),
        (("stat", "no such section"), "section='no such section' must be"),
    ],
)
def test_what_the_client_refuses_to_send_is_one_line(
    run_coli: RunColi, daemon: Daemon, words: tuple[str, ...], message: str
) -> None:
    done = run_coli(*words, "--connect", daemon.address)
    assert done.status == 2
    assert done.err.startswith(f"coli: {message}")
    assert done.err.count("\n") == 1


def test_stat_reset_starts_a_new_window(run_coli: RunColi, daemon: Daemon) -> None:
    assert run_coli("gen", "a", "--max=1", "--connect", daemon.address).status == 0
    assert run_coli("stat", "reset", "--connect", daemon.address).out == ""
    figures = json.loads(run_coli("stat", "--json", "--connect", daemon.address).out)
    assert figures["requests_total"] == figures["generated_tokens_total"] == 0


def test_stat_shows_sections_as_text_and_as_json(run_coli: RunColi, daemon: Daemon) -> None:
    route = run_coli("stat", "route", "--connect", daemon.address)
    assert re.search(r"^route_mode +max-rank$", route.out, re.MULTILINE)
    figures = json.loads(run_coli("stat", "--json", COLI_LISTEN=daemon.address).out)
    assert figures["model_type"] == "glm4_moe"
    assert figures["cache_slots_per_layer"] == 8
    assert figures["lookups"] == figures["hits_pin"] + figures["hits_lru"] + figures["misses"]


def test_chat_answers_turns_and_commands(run_coli: RunColi, small_model: Path) -> None:
    lines = "Hello\n\n/set max 3\n//slash\n/set temp hot\n/bogus\n/stat\n/reset\n/help\n/quit\nnever\n"
    flags = ("--model", str(small_model), "--max", "5", "--seed", "1")
    done = run_coli("chat", *flags, input=lines, CACHE_ROUTE="1", ROUTE_J="2", ROUTE_M="12")
    assert done.status == 0, done.err
    footers = re.findall(rf"^{FOOTER}$", done.out, re.MULTILINE)
    assert len(footers) == 2
    assert re.findall(r"^(\d) tok ", done.out, re.MULTILINE) == ["5", "3"]
    assert "! temp is 'hot' (from /set), must be a number in [0, 100]\n" in done.out
    assert "! '/bogus' is no command; /help shows them all\n" in done.out
    assert "requests_total 2\n" in done.out
    assert "(forgotten)\n" in done.out
    assert "/set OPTION VALUE" in done.out


def test_chat_sends_its_routing_to_the_session_and_not_to_the_daemon(
    run_coli: RunColi, daemon: Daemon
) -> None:
    done = run_coli(
        "chat", "--connect", daemon.address, "--route-j", "1", input="/stat\n/stat route\n", CACHE_ROUTE="1"
    )
    session, _, whole = done.out.partition("\npilot ")
    assert {"cache_route 1", "route_j 1"} <= set(session.splitlines())
    assert {"cache_route 0", "route_j 2"} <= set(done.out.splitlines())
    assert whole


def test_chat_goes_on_after_an_error_of_one_turn(run_coli: RunColi, daemon: Daemon) -> None:
    lines = f"{'word ' * 6000}\nHello\n"
    done = run_coli("chat", "--connect", daemon.address, "--max", "4", input=lines)
    assert done.status == 0
    assert done.out.startswith("! CONTEXT_EXCEEDED: ")
    assert re.search(r"^4 tok ", done.out, re.MULTILINE)


def test_chat_ends_with_the_connection(
    start_chat: StartChat, start_daemon: StartDaemon, small_model: Path
) -> None:
    with start_daemon("--model", str(small_model)) as daemon:
        chat = start_chat("--connect", daemon.address, "--max", "2")
        assert chat.stdin is not None
        assert chat.stdout is not None
        _say(chat, "Hello")
        _read_until(chat, "stock routing")
        assert daemon.stop() == 0
        _, err = chat.communicate("Hello again\n", timeout=60)
    assert chat.returncode == 1
    assert err.startswith("coli: the server closed the connection")


def test_ctrl_c_cancels_the_turn_and_keeps_the_session(start_chat: StartChat, small_model: Path) -> None:
    flags = ("--model", str(small_model), "--context", "60000", "--max", "50000")
    chat = start_chat(*flags, CACHE_ROUTE="1")
    assert chat.stdout is not None
    _say(chat, "Hello")
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    _read_until(chat, "(cancelled)")
    out, err = chat.communicate("/set max 3\nHello\n/stat\n", timeout=60)
    assert chat.returncode == 0, err
    assert re.search(rf"^3{FOOTER[3:]}$", out, re.MULTILINE)
    assert "requests_cancelled_total 1\n" in out
    assert "requests_length_total 1\n" in out


@pytest.mark.parametrize("ending", ["end of input", "SIGKILL"])
def test_a_private_daemon_ends_with_its_chat_however_that_ends(
    start_chat: StartChat, small_model: Path, ending: str
) -> None:
    chat = start_chat("--model", str(small_model))
    _say(chat, "/stat server")
    pid = int(_read_until(chat, r"pid \d+\n").split()[-1])
    assert _alive(pid)
    if ending == "SIGKILL":
        chat.kill()
    chat.communicate(timeout=60)
    for _ in range(600):
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)


def test_on_a_terminal_there_is_a_prompt_and_ctrl_d_ends_it(
    daemon: Daemon, clean_environment: Mapping[str, str]
) -> None:
    main, side = pty.openpty()
    command = [
        sys.executable,
        "-P",
        "-m",
        "coli_server.cli",
        "chat",
        "--connect",
        daemon.address,
        "--max",
        "3",
    ]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=clean_environment)
    os.close(side)
    _read_terminal(main, "> ")
    os.write(main, b"Hello\n")
    shown = _read_terminal(main, "stock routing\r\n> ")
    os.write(main, b"\x04")
    assert process.wait(60) == 0
    os.close(main)
    assert "3 tok | " in shown


def _say(chat: subprocess.Popen[str], line: str) -> None:
    assert chat.stdin is not None
    chat.stdin.write(line + "\n")
    chat.stdin.flush()


def _read_until(chat: subprocess.Popen[str], pattern: str) -> str:
    """What the chat says until `pattern` was in it; the match is at its end."""
    assert chat.stdout is not None
    said = ""
    while not re.search(pattern + r"\Z", said):
        char = chat.stdout.read(1)
        if not char:
            pytest.fail(f"no {pattern!r} in {said!r}; {chat.stderr.read() if chat.stderr else ''}")
        said += char
    return said


def _read_terminal(main: int, text: str) -> str:
    said = b""
    while text.encode() not in said:
        readable, _, _ = select.select([main], [], [], 60)
        assert readable, f"no {text!r} in {said!r}"
        said += os.read(main, 4096)
    return said.decode(errors="replace")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
