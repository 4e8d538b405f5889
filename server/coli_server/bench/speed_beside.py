"""Rows of `coli bench speed` about what is beside sessions that decode: PING, STAT, idle connections."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from coli_server.bench.speed_report import Report, Row, p99
from coli_server.bench.speed_serving import Daemon, Subject, together
from coli_server.bench.speed_streams import Line, Streams
from coli_server.errors import ModelError

ROUNDS = 3
PROBES = 200  # of each command in a round
PAUSE = 0.005  # seconds between them
SESSIONS, TOKENS = 8, 512
IDLE, IDLE_MEGABYTES, IDLE_SESSIONS = 1000, 40, 4

Times = dict[str, list[float]]


def answers(report: Report, subject: Subject, daemon: Daemon) -> None:
    """How long PING and STAT take beside sessions that decode, and when nothing runs, in turns."""
    idle: Times = {"PING": [], "STAT": []}
    busy: Times = {"PING": [], "STAT": []}
    for _ in range(ROUNDS):
        _probe(daemon, idle)
        _probe_busy(subject, daemon, busy)
    for command in idle:
        quiet, beside = (1000 * p99(times[command]) for times in (idle, busy))
        report.measured[f"{command} p99 of the {subject.name}, ms"] = {"idle": quiet, "generating": beside}
        words = f"{subject.name}: {command} p99 while {SESSIONS} sessions generate minus idle, ms"
        report.rows.append(Row.within(words, beside - quiet, 1.0))


def _probe(daemon: Daemon, times: Times) -> None:
    line = Line(daemon.port)
    for _ in range(PROBES):
        for command, found in times.items():
            time.sleep(PAUSE)
            found.append(line.seconds(command))
    line.close()


def _probe_busy(subject: Subject, daemon: Daemon, times: Times) -> None:
    """While sessions decode. Nobody reads their answers meanwhile: the system's buffers have room."""
    with Streams(daemon.port) as streams:
        running = [streams.start(subject.prompt(number), TOKENS) for number in range(SESSIONS)]
        streams.read_until(lambda: all(stream.tokens for stream in running))
        _probe(daemon, times)
        end = time.perf_counter()
        streams.read_until(lambda: all(stream.tokens[-1] > end or stream.words for stream in running))
        if any(stream.words for stream in running):
            raise ModelError("sessions ended before all answers had been measured")
    daemon.rest()


def idle_connections(report: Report, subject: Subject, daemon: Daemon) -> None:
    """What connections that do nothing cost, in memory and in speed: with and without them, in turns."""
    grown: list[int] = []
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(ROUNDS):
        rates["without"].append(together(daemon, subject, IDLE_SESSIONS))
        before = daemon.memory("VmRSS")
        with _connections(daemon.port, IDLE):
            grown.append(daemon.memory("VmRSS") - before)
            rates["with"].append(together(daemon, subject, IDLE_SESSIONS, IDLE))
        daemon.rest()
    report.measured[f"idle connections of the {subject.name}"] = {"grown": grown, "rates": rates}
    words = f"{subject.name}: {IDLE} idle connections"
    report.rows += [
        # The first round's: later ones find the memory that it has left behind.
        Row.within(f"{words}, growth of the resident set, MB", max(grown) / 1e6, IDLE_MEGABYTES),
        Row.against(
            f"{words} against none, tokens/s of {IDLE_SESSIONS} sessions",
            rates["with"],
            rates["without"],
            0.97,
        ),
    ]


@contextmanager
def _connections(port: int, count: int) -> Iterator[None]:
    """Connections that have said PING once, so that the daemon has made all that it keeps for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
    with ExitStack() as stack:
        for _ in range(count):
            line = Line(port)
            stack.callback(line.close)
            line.ask("PING")
        yield
