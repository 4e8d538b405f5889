"""The pace of running sessions while a long prompt is read, as their clients see it."""

from __future__ import annotations

from coli_server.bench.speed_report import Report, Row, p99
from coli_server.bench.speed_serving import Daemon, Subject, serving
from coli_server.bench.speed_streams import Streams, prompt_ids
from coli_server.errors import ModelError

ROUNDS = 3
SESSIONS, TOKENS = 4, 512
QUIET = 64  # tokens of each session without a prompt beside them
PROMPT = 2000
GOAL = 2.5


def pace(report: Report, subject: Subject) -> None:
    """Gaps between the lines of running sessions, with nobody else and while a prompt is read, in turns."""
    quiet: list[list[float]] = []
    beside: list[list[float]] = []
    seconds = []
    with serving(subject) as daemon:
        daemon.load()
        for number in range(ROUNDS):
            alone, together, took = _round(subject, daemon, number)
            quiet.append(alone)
            beside.append(together)
            seconds.append(took)
            daemon.rest()
    name = subject.name
    report.measured[f"pace of the {name}"] = {"quiet": quiet, "beside": beside, "seconds": seconds}
    limit, value = (1000 * p99([gap for gaps in each for gap in gaps]) for each in (quiet, beside))
    each = [1000 * p99(gaps) for gaps in beside]
    words = f"{name}: p99 of the time between tokens, {SESSIONS} sessions, beside a prompt of {PROMPT} tokens"
    report.rows += [
        Row(
            f"{words} against none, ms",
            value,
            limit,
            value / limit,
            GOAL,
            (min(each), max(each)),
            at_most=True,
        ),
        Row.against(f"{name}: that prompt, tokens/s", [PROMPT / took for took in seconds], None, None),
    ]


def _round(subject: Subject, daemon: Daemon, number: int) -> tuple[list[float], list[float], float]:
    """Gaps alone, gaps beside a prompt, and the seconds that it took; another prompt for each `number`."""
    with Streams(daemon.port) as streams:
        running = [streams.start(subject.prompt(each), TOKENS) for each in range(SESSIONS)]
        begin = streams.read_until(lambda: all(len(stream.tokens) > 1 for stream in running))
        read = [len(stream.tokens) for stream in running]
        end = streams.read_until(
            lambda: all(
                len(stream.tokens) >= before + QUIET for stream, before in zip(running, read, strict=True)
            )
        )
        alone = [gap for stream in running for gap in stream.gaps(begin, end)]
        reader = streams.start(prompt_ids(PROMPT, number + 2), 1)
        streams.read_until(lambda: reader.ended is not None)
        assert reader.accepted is not None
        assert reader.ended is not None
        begin, end = reader.accepted, reader.ended
        together = [gap for stream in running for gap in stream.gaps(begin, end)]
    if not alone or not together:
        raise ModelError(f"{SESSIONS} sessions made no tokens to count beside a prompt of {PROMPT} tokens")
    return alone, together, end - begin
