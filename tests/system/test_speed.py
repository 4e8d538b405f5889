"""The daemon's parts of `coli bench speed` on a small model: every row is there, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coli_server.bench import (
    speed_beside,
    speed_daemon,
    speed_model,
    speed_pace,
    speed_serving,
    speed_streams,
)
from coli_server.bench.speed_daemon import daemon_rows, start_row
from coli_server.bench.speed_pace import PROMPT, pace
from coli_server.bench.speed_report import Report
from coli_server.bench.speed_serving import Daemon, Subject, serving, together
from coli_server.bench.speed_streams import Line, Streams
from coli_server.engine.pacing import LEAST, REFRESH
from coli_server.errors import ModelError

SMALL = {
    speed_serving: {"TOKENS": 400, "WARM_UP_IDS": 64},
    speed_daemon: {"ROUNDS": 1, "STARTS": 1, "SESSIONS": (1, 2)},
    speed_beside: {"ROUNDS": 1, "PROBES": 5, "SESSIONS": 2, "TOKENS": 2000, "IDLE": 300},
    speed_streams: {"IDS": range(300, 3900)},
    speed_pace: {"ROUNDS": 1, "SESSIONS": 2, "TOKENS": 2000, "QUIET": 8},
}


@pytest.fixture(autouse=True)
def on_a_small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, values in SMALL.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The benchmark model, but narrow."""
    narrow = {"HIDDEN": 32, "WIDTH": 16, "EXPERTS": 8, "K": 2, "HEADS": 4, "VOCAB": 4000}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in narrow.items():
            patch.setattr(speed_model, name, value)
        folder = speed_model.make_model(tmp_path_factory.mktemp("models"), 2, lambda _: None)
    return Subject("small", folder, 1 << 30, 1, 1.0, random=True)


@pytest.fixture
def daemon(subject: Subject) -> Iterator[Daemon]:
    with serving(subject) as running:
        yield running


def test_the_daemon_has_a_row_for_everything(subject: Subject) -> None:
    report = Report("a machine", "coli bench speed")
    report.rows.append(start_row(subject))
    daemon_rows(report, subject)
    assert [row.name.removeprefix("small: ") for row in report.rows] == [
        "start until READY, s",
        "2 sessions against one, tokens/s together",
        "PING p99 while 2 sessions generate minus idle, ms",
        "STAT p99 while 2 sessions generate minus idle, ms",
        "300 idle connections, growth of the resident set, MB",
        "300 idle connections against none, tokens/s of 4 sessions",
        "most memory of the daemon against --ram, load time included, bytes",
    ]
    assert all(row.goal is not None and row.ratio is not None for row in report.rows)
    assert report.rows[-1].value > 0


def test_the_pace_counts_gaps_before_and_beside_a_prompt(subject: Subject) -> None:
    report = Report("a machine", "coli bench speed")
    pace(report, subject)
    found = report.measured["pace of the small"]
    assert len(found["quiet"][0]) >= 2 * 7
    # 2,000 tokens, at least so many in a step that also decodes, each with a token of both sessions, and now
    # and then a step that decodes only.
    steps = PROMPT / LEAST * (1 + 1 / REFRESH) + 2
    assert 0 < len(found["beside"][0]) <= 2 * steps
    assert (report.rows[0].goal, report.rows[0].at_most) == (2.5, True)


def test_sessions_that_end_early_are_told(daemon: Daemon, subject: Subject) -> None:
    assert together(daemon, subject, 2) > 0
    with Streams(daemon.port) as streams:
        streams.start(subject.prompt(0), 2)
        with pytest.raises(ModelError, match=r"answers ended early: .*'finish': 'length'"):
            streams.read_until(lambda: False)


def test_a_refused_request_is_told(daemon: Daemon) -> None:
    with Streams(daemon.port) as streams:
        streams.start("x", 0)
        with pytest.raises(ModelError, match="refused a request: ERR BAD_OPTION"):
            streams.read_until(lambda: False)
    daemon.rest()
    line = Line(daemon.port)
    assert line.ask("PING") == "PONG\n"
    assert line.ask("STAT").endswith("END\n")
    line.close()
