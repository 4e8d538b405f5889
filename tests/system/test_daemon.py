"""The process as a whole: its start, its signals, its exit status, tools that talk to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pymemcache.client.base import Client as MemcacheClient


@contextlib.contextmanager
def connected(daemon: Any) -> Iterator[Any]:
    with socket.create_connection((daemon.host, daemon.port), timeout=30) as one:
        yield one.makefile("rw", newline="\n")


def until(file: Any, start: str) -> list[str]:
    lines: list[str] = []
    for line in file:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    raise AssertionError(f"no {start!r} in {lines}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_the_exit_status_is_zero(
    start_daemon: Any, endless_model: Path, number: signal.Signals
) -> None:
    with start_daemon("--model", str(endless_model)) as daemon, connected(daemon) as file:
        file.write("GEN max=1000 Hello\n")
        file.flush()
        until(file, "TOK")
        daemon.process.send_signal(number)
        assert until(file, "DONE")[-1].startswith("DONE 1 finish=length tokens=1000 ")
        assert file.readline() == ""
        file.close()
        assert daemon.process.wait(30) == 0


def test_a_second_signal_ends_the_process_at_once(start_daemon: Any, endless_model: Path) -> None:
    with (
        start_daemon("--model", str(endless_model), "--drain-seconds", "1000") as daemon,
        connected(daemon) as file,
    ):
        file.write("GEN max=60000 Hello\n")
        file.flush()
        until(file, "TOK")
        daemon.process.send_signal(signal.SIGTERM)
        file.write("STAT\n")  # the signal has been taken when this says so
        file.flush()
        until(file, "TOK")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 128 + signal.SIGTERM


def test_a_daemon_that_has_one_processor_only_ends(
    small_model: Path, clean_environment: Mapping[str, str]
) -> None:
    one = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0"],
        env={**clean_environment, "COLI_MODEL": str(small_model)},
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        while not process.stderr.readline().startswith("READY"):
            assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_half_closed_input_gets_its_output_and_memcached_tools_read_the_figures(
    start_daemon: Any, endless_model: Path
) -> None:
    with start_daemon("--model", str(endless_model)) as daemon:
        with socket.create_connection((daemon.host, daemon.port), timeout=30) as one:
            one.sendall(b"GEN max=5 Hello\nCHAT max=5 Hello\nSTAT session\n")
            one.shutdown(socket.SHUT_WR)
            lines = one.makefile().read().splitlines()
        assert lines[-1] == "END"
        assert "STAT requests_length_total 2" in lines
        stats = MemcacheClient((daemon.host, daemon.port)).stats()
        assert stats[b"model"] == b"endless"
        assert int(stats[b"generated_tokens_total"]) == 10


def test_a_taken_port_is_told_before_the_model_is_looked_at(run_coli: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_coli("serve", "--listen", place, "--model", str(tmp_path))
    assert done.status == 2
    assert done.err.startswith(f"coli: COLI_LISTEN is {place}: ")


def test_a_folder_without_a_model_is_named_and_nothing_is_ready(run_coli: Any, tmp_path: Path) -> None:
    done = run_coli("serve", "--listen", "127.0.0.1:0", "--model", str(tmp_path))
    assert done.status == 1
    assert done.err.startswith("coli: ")
    assert str(tmp_path) in done.err
    assert "READY" not in done.err


def test_objects_that_stay_are_left_out_of_garbage_collections(start_daemon: Any, small_model: Path) -> None:
    """Or each full collection looks at all that a model and its kernels are made of, and all clients wait."""
    with start_daemon("--model", str(small_model), "--log-level", "debug") as daemon:
        (line,) = [line for line in daemon.log if "objects stay as long as the process" in line]
        counted = re.search(r"(\d+) objects stay", line)
        assert counted is not None
        assert int(counted[1]) > 10_000
