"""The daemon's rows of `coli bench speed`: start, sessions together, figures under load, memory."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from coli_client import Client
from coli_server.bench.speed_report import Row

RAM = 10 << 30
TOKENS = 24
PROBES = 100


def daemon_rows(model: Path, threads: int) -> list[Row]:
    """Start a daemon on `model`, use it, stop it."""
    command = [sys.executable, "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--model", str(model), "--ram", str(RAM), "--threads", str(threads), "--context", "1024"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        port = _ready(process)
        start = time.perf_counter() - began
        rows = [Row("start until READY, s", start, 3.0, start / 3.0, 1.0, at_most=True)]
        _generate(port, 1, 8 * TOKENS)  # everything that is used is in memory
        idle = _stat_seconds(port)
        rates: dict[int, float] = {}
        for sessions in (1, 4, 8):
            rates[sessions], busy = _together(port, sessions)
            if sessions > 1:
                goal = 1.8 if sessions == 8 else None
                name = f"{sessions} sessions against one, tokens/s together"
                rows.append(Row.against(name, [rates[sessions]], [rates[1]], goal))
        rows.append(
            Row("STAT p99 while generating minus idle, ms", busy - idle, 1.0, busy - idle, 1.0, at_most=True)
        )
        peak = _peak(process.pid)
        rows.append(Row("most memory against --ram, bytes", peak, RAM, peak / RAM, 1.05, at_most=True))
    finally:
        process.terminate()
        process.wait(60)
    return rows


def _ready(process: subprocess.Popen[str]) -> int:
    """The daemon's port, once it says so; from then on somebody reads what it says."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.match(r"READY \S+:(\d+)\b", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return int(match[1])
    raise RuntimeError(f"the daemon ended with status {process.wait()}")


def _generate(port: int, sessions: int, tokens: int) -> None:
    """One answer of `tokens` tokens in each of `sessions` connections at the same time."""

    def one(number: int) -> None:
        with Client("127.0.0.1", port) as client:
            client.generate(f"{number} words of a prompt", max=tokens).wait()

    workers = [threading.Thread(target=one, args=(number,)) for number in range(sessions)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _together(port: int, sessions: int) -> tuple[float, float]:
    """Tokens a second of all sessions, and the p99 of STAT meanwhile in milliseconds."""
    seen: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        with Client("127.0.0.1", port) as client:
            while not ended.wait(0.01):
                seen.append(_stat_once(client))

    prober = threading.Thread(target=probe)
    prober.start()
    start = time.perf_counter()
    _generate(port, sessions, TOKENS)
    seconds = time.perf_counter() - start
    ended.set()
    prober.join()
    return sessions * TOKENS / seconds, _p99(seen)


def _stat_seconds(port: int) -> float:
    with Client("127.0.0.1", port) as client:
        return _p99([_stat_once(client) for _ in range(PROBES)])


def _stat_once(client: Client) -> float:
    start = time.perf_counter()
    client.stat()
    return 1000 * (time.perf_counter() - start)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def _peak(pid: int) -> int:
    """The most memory that a process has had in RAM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
