"""`coli bench`: speed and its price in quality, on a text fed token by token.

Arms: stock (neither lever), A (CACHE_ROUTE=1), B (PILOT=1), C (both). The routing settings of the command
line and the environment are those of arms A and C. In shared scope the arms take turns on the real cache. In
session scope (ROUTE_SCOPE=session) all windows run side by side, each on a logical cache, and nothing is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from coli_server.bench.arms import Arm, arms_of, logical_hits, run_arms
from coli_server.bench.command import (
    ENGINE_SETTINGS,
    add_text_arguments,
    open_engine,
    positive,
    show_progress,
    text_windows,
)
from coli_server.bench.gates import DEFAULT, Gate, Verdict, judge, parse_gates
from coli_server.bench.summary import Interval, Quality, Traffic, quality, traffic
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings, add_arguments, load, policy_arguments


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One row of the table. `mode` says what was on."""

    arm: str
    mode: str
    traffic: Traffic
    quality: Quality


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    experts: int
    k: int
    slots: int
    cache: str
    windows: int
    window: int
    chunk: int
    arms: tuple[ArmReport, ...]


def main(words: Sequence[str]) -> int:
    """Print the table or JSON, and with --gate the verdicts; exit status 1 if a gate is not passed."""
    arguments, settings = _parse(words)
    gates = parse_gates(arguments.gate) if arguments.gate else ()
    arms = arms_of(arguments.arms, RoutePolicy(**policy_arguments(settings)))
    engine = open_engine(settings)
    try:
        windows = text_windows(engine, arguments)
        report = measure(engine, arms, windows, warm=arguments.cache == "warm", chunk=arguments.chunk)
    finally:
        engine.close()
    verdicts = verdicts_of(report, gates)
    if arguments.json:
        print(json.dumps({**asdict(report), "gates": [asdict(verdict) for verdict in verdicts]}))
    else:
        print(render(report), *verdicts, sep="\n")
    return int(not all(verdict.passed for verdict in verdicts))


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        prog="coli bench quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_text_arguments(parser, windows=8, window=512)
    parser.add_argument("--arms", default="stock,A,B,C", metavar="LIST", help="arms to run (stock,A,B,C)")
    parser.add_argument(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="shared scope: the cache before each window: empty, or as after reading the first one (cold)",
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=1,
        metavar="N",
        help="tokens of a step; more than 1 hides what routing costs, and is there to show that (1)",
    )
    parser.add_argument(
        "--gate",
        nargs="?",
        const=DEFAULT,
        metavar="LIMITS",
        help=f"limits that every arm must keep ({DEFAULT.replace('%', '%%')})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, (*ENGINE_SETTINGS, *(name for name in ROUTING if name != "cache_route")))
    arguments = parser.parse_args(list(words))
    return arguments, load(vars(arguments), os.environ)


def measure(
    engine: Engine, arms: Sequence[Arm], windows: Sequence[Window], *, warm: bool = False, chunk: int = 1
) -> Report:
    """Run the arms on windows of one length."""
    runs = run_arms(engine, windows, arms, warm=warm, chunk=chunk, progress=show_progress)
    rows = []
    logical = any(arm.policy.active and arm.policy.scope == "session" for arm in arms)
    policy = next((arm.policy for arm in arms if arm.policy.active), arms[0].policy)
    for arm, found in zip(arms, runs, strict=True):
        hits = None
        if logical:
            each = [logical_hits(run, policy, engine) for run in found]
            hits = (sum(lookups for lookups, _ in each), sum(misses for _, misses in each))
        rows.append(ArmReport(arm.name, arm.describe(), traffic(found, hits), quality(found)))
    slots = policy.session_capacity(engine.k, engine.experts) if logical else engine.cache.slots_per_layer
    state = "logical" if logical else "warm" if warm else "cold"
    length = len(windows[0])
    return Report(
        engine.name, engine.experts, engine.k, slots, state, len(windows), length, chunk, tuple(rows)
    )


def verdicts_of(report: Report, gates: tuple[Gate, ...]) -> list[Verdict]:
    """The verdicts of all arms but stock; of stock, too, when it is alone."""
    arms = [row for row in report.arms if row.arm != "stock"] or report.arms
    return [verdict for row in arms for verdict in judge(row.arm, row.quality, gates)]


def render(report: Report) -> str:
    """The report as a Markdown table."""
    lines = [
        f"{report.model}: {report.k} of {report.experts} experts, {report.slots} in the cache of a layer "
        f"({report.cache}); {report.windows} windows of {report.window} tokens, "
        f"{report.chunk} in a step",
        "",
        "| arm | mode | tok/s | hit % (pin + LRU) | bytes/token | swap % | agree % | route KL "
        "| perplexity | increase % | KL to stock | top-1 % |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.arms:
        t, q = row.traffic, row.quality
        cells = [
            row.arm,
            row.mode,
            "-" if t.tok_s is None else _interval(t.tok_s, 2),
            f"{t.hit_pct:.1f} ({t.pin_pct:.1f} + {t.lru_pct:.1f})",
            "-" if t.bytes_per_token is None else f"{t.bytes_per_token:,.0f}",
            f"{t.swap_pct:.1f}",
            f"{t.agree_pct:.1f}",
            f"{t.route_kl:.3f}",
            _interval(q.perplexity, 3),
            _interval(q.increase, 2),
            _interval(q.kl, 4),
            _interval(q.top1, 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("\nIn brackets: 95 % confidence intervals, by bootstrap over windows.")
    return "\n".join(lines)


def _interval(figure: Interval, digits: int) -> str:
    return f"{figure.value:.{digits}f} [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"
