"""Load a running daemon for long, with clients that are slow or killed, and see that nothing stays behind.

The load warms the daemon up; what it then holds, quiet, is the baseline. Then the load runs for --minutes.
When it is quiet again, descriptors, threads, tasks, sessions, KV caches and memory must be as before, and all
counters must add up. The exit status is 1 if not. The daemon should serve nobody else meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from coli_server.bench.checks import Footprint, broken_accounts, broken_invariants, quiet
from coli_server.bench.load import Tally, closed_loop
from coli_server.bench.serve import add_load_arguments, endpoint_of, mix_of
from coli_server.errors import ConfigurationError

WARM_UP = 0.15  # of the time, before the baseline is taken
TOLERANCE = 0.05
# Allocators keep a little of what was freed, and small processes have no 5 % to speak of.
LEAST_GROWTH = {"rss_bytes": 16 << 20, "descriptors": 2}


@dataclass(frozen=True, slots=True)
class Report:
    """What was left behind: `grown` is more than 5 % over the baseline, `wrong` does not add up."""

    model: str
    mode: str
    minutes: float
    requests: int
    ended: dict[str, int]
    connections: int
    tokens: int
    baseline: Footprint
    end: Footprint
    grown: tuple[str, ...]
    wrong: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    arguments = _parse(words)
    report = asyncio.run(run(arguments))
    print(json.dumps(asdict(report), indent=2) if arguments.json else render(report))
    return 1 if report.grown or report.wrong else 0


async def run(arguments: argparse.Namespace) -> Report:
    """Warm up, take the baseline, load, and compare."""
    endpoint, mix = endpoint_of(arguments), mix_of(arguments)
    watcher = await endpoint.connect()
    seconds = arguments.minutes * 60

    async def load(part: float, seed: int) -> Tally:
        until = time.perf_counter() + seconds * part
        return await closed_loop(
            endpoint, mix, clients=arguments.clients, requests=sys.maxsize, until=until, seed=seed
        )

    await load(WARM_UP, arguments.seed)
    before = await quiet(watcher)
    tally = await load(1.0, arguments.seed + 1)
    after = await quiet(watcher)
    baseline, end = Footprint.of(before), Footprint.of(after)
    await watcher.quit()
    return Report(
        model=after["model"],
        mode=after["mode"],
        minutes=arguments.minutes,
        requests=len(tally.samples),
        ended=dict(Counter(sample.ended for sample in tally.samples)),
        connections=tally.reconnects,
        tokens=int(after["generated_tokens_total"]) - int(before["generated_tokens_total"]),
        baseline=baseline,
        end=end,
        grown=tuple(grown(baseline, end)),
        wrong=(*broken_accounts(before, after, tally), *broken_invariants(after)),
    )


def grown(baseline: Footprint, end: Footprint) -> list[str]:
    """What the daemon holds more of than it did, in words."""
    then, now = asdict(baseline), asdict(end)
    found = []
    for name, value in then.items():
        room = max(TOLERANCE * (value or 0), LEAST_GROWTH.get(name, 0))
        if value is not None and now[name] is not None and now[name] > value + room:
            found.append(f"{name} grew from {value} to {now[name]}")
    return found


def render(report: Report) -> str:
    ended = ", ".join(f"{count} {name}" for name, count in sorted(report.ended.items()))
    lines = [
        f"{report.model}, {report.mode}: {report.minutes:g} minutes, {report.connections} connections",
        f"{report.requests} requests ({ended}), {report.tokens} tokens",
        "",
        f"{'':<16}{'baseline':>14}{'end':>14}",
    ]
    then, now = asdict(report.baseline), asdict(report.end)
    lines += [f"{name:<16}{then[name]!s:>14}{now[name]!s:>14}" for name in then]
    problems = [*report.grown, *report.wrong]
    return "\n".join([*lines, "", *(problems or ["nothing is left behind, and all counters add up"])])


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="coli bench soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load_arguments(parser, clients=16)
    parser.set_defaults(prompt="8-256", output="4-128", chat=0.3, slow=0.1, vanish=0.1)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="how long (30)")
    arguments = parser.parse_args(words)
    if not 0 < arguments.minutes <= 14 * 24 * 60 or arguments.clients < 1:
        raise ConfigurationError("--minutes must be above 0 and at most two weeks, --clients at least 1")
    return arguments
