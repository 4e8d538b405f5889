"""The daemon's rows of `coli bench speed`: start, sessions together, answers beside them, memory."""

from __future__ import annotations

from coli_server.bench.speed_beside import answers, idle_connections
from coli_server.bench.speed_report import Report, Row
from coli_server.bench.speed_serving import Daemon, Subject, serving, together

ROUNDS, STARTS = 3, 3
SESSIONS = (1, 4, 8)


def start_row(subject: Subject) -> Row:
    """Start it some times; the first one may find an empty code cache and page cache."""
    seconds = []
    for _ in range(STARTS):
        with serving(subject) as daemon:
            seconds.append(daemon.seconds)
    return Row.against(f"{subject.name}: start until READY, s", seconds, [3.0], 1.0, at_most=True)


def daemon_rows(report: Report, subject: Subject) -> None:
    """Start a daemon, let sessions decode together, look what is beside them, and stop it."""
    with serving(subject) as daemon:
        daemon.load()
        _sessions(report, subject, daemon)
        answers(report, subject, daemon)
        idle_connections(report, subject, daemon)
        peak = daemon.memory("VmHWM")
    name = f"{subject.name}: most memory of the daemon against --ram, load time included, bytes"
    report.rows.append(Row.within(name, peak, subject.ram, 1.05))


def _sessions(report: Report, subject: Subject, daemon: Daemon) -> None:
    rates: dict[int, list[float]] = {sessions: [] for sessions in SESSIONS}
    for round in range(ROUNDS + 1):
        for sessions in SESSIONS:
            rates[sessions].append(together(daemon, subject, sessions))
            if not round:  # warms up
                rates[sessions].clear()
    report.measured[f"sessions of the {subject.name}"] = rates
    for sessions in SESSIONS[1:]:
        name = f"{subject.name}: {sessions} sessions against one, tokens/s together"
        goal = subject.sessions_goal if sessions == SESSIONS[-1] else None
        report.rows.append(Row.against(name, rates[sessions], rates[1], goal))
