"""Choose a routing policy for a model, a text, a machine and a budget of quality.

Many settings are first scored on logical caches of the real one's size, where nothing needs the disk. The
ones that keep the budget with the fewest misses then run on the real cache, in turns with stock routing, and
the fastest one that keeps the budget there, too, is the choice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coli_server.bench.arms import Arm, run_arms
from coli_server.bench.command import (
    ENGINE_SETTINGS,
    add_text_arguments,
    open_engine,
    positive,
    show_progress,
    text_windows,
)
from coli_server.bench.decode import STOCK, decode_in_lockstep
from coli_server.bench.gates import Gate, judge, parse_gates
from coli_server.bench.summary import Quality, quality, traffic
from coli_server.bench.sweep import Grid
from coli_server.bench.trace import Choices, lru_misses
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.routing import RoutePolicy
from coli_server.settings import SETTINGS, add_arguments, load

BUDGET = "ppl=0.5%"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy on the real cache: its quality, its speed, and whether it keeps the budget."""

    policy: RoutePolicy
    quality: Quality
    tok_s: float
    within: bool


def main(words: Sequence[str]) -> int:
    """Print what was measured, and the line for the service's environment."""
    parser = argparse.ArgumentParser(
        prog="coli tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_text_arguments(parser, windows=4, window=256)
    parser.add_argument(
        "--budget",
        default=BUDGET,
        metavar="LIMITS",
        help=f"what quality may cost: ppl=N%%, top1=N%%, kl=N ({BUDGET.replace('%', '%%')})",
    )
    parser.add_argument("--time", type=positive, default=3, metavar="N", help="policies to time (3)")
    add_arguments(parser, ENGINE_SETTINGS)
    arguments = parser.parse_args(list(words))
    budget = parse_gates(arguments.budget)
    engine = open_engine(load(vars(arguments), os.environ))
    try:
        windows = text_windows(engine, arguments)
        promising = screen(engine, windows, budget)
        print(f"{len(promising)} settings keep {arguments.budget} on logical caches", flush=True)
        stock, candidates = measure(engine, windows, promising[: arguments.time], budget)
    finally:
        engine.close()
    print(render(stock, candidates))
    print(advice(choose(stock, candidates)))
    return 0


def screen(engine: Engine, windows: Sequence[Window], budget: tuple[Gate, ...]) -> list[RoutePolicy]:
    """The policies of a grid that keep `budget`, the one with the fewest misses first; in shared scope."""
    capacity = engine.cache.slots_per_layer
    if capacity >= engine.experts:
        return []  # everything fits: nothing would ever be swapped
    policies = grid(engine.k, engine.experts).policies(capacity)
    stock, runs = decode_in_lockstep(engine, windows, policies, show_progress)

    def misses(choices: Sequence[Choices]) -> int:
        return sum(lru_misses(each, engine.experts, capacity) for each in choices)

    before = misses(stock)
    found: list[tuple[int, RoutePolicy]] = []
    for policy, by_window in zip(policies, runs, strict=True):
        after = misses([run.choices for run in by_window])
        if after < before and _within(quality(by_window), budget):
            found.append((after, replace(policy, scope="shared", capacity=0)))
    return [policy for _, policy in sorted(found, key=lambda each: each[0])]


def grid(k: int, experts: int) -> Grid:
    """Settings worth trying for a model that uses `k` of `experts`."""
    rest = experts - k
    return Grid(
        j=tuple(sorted({1, 2, k // 2} - {0})),
        m=tuple(sorted({k + max(1, rest // 8), k + rest // 4, k + rest // 2})),
        p=(0.7, 0.85),
        alpha=(1.0,),
        lam=(0.02, 0.05, 0.1, 0.2),
        cache=(50.0,),
    )


def measure(
    engine: Engine, windows: Sequence[Window], policies: Sequence[RoutePolicy], budget: tuple[Gate, ...]
) -> tuple[Candidate, list[Candidate]]:
    """Run stock routing and `policies` in turns on the real cache; stock, and the others."""
    arms = [Arm("stock", replace(STOCK, agree=True), False)]
    arms += [Arm(str(n), policy, False) for n, policy in enumerate(policies)]
    candidates = []
    for arm, runs in zip(arms, run_arms(engine, windows, arms, progress=show_progress), strict=True):
        found, speed = quality(runs), traffic(runs).tok_s
        assert speed is not None
        candidates.append(Candidate(arm.policy, found, speed.value, _within(found, budget)))
    return candidates[0], candidates[1:]


def choose(stock: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of those that keep the budget; stock routing where none of them is faster."""
    allowed = [candidate for candidate in candidates if candidate.within]
    return max([stock, *allowed], key=lambda candidate: candidate.tok_s)


def advice(chosen: Candidate) -> str:
    """The line to put into the service's environment."""
    if not chosen.policy.active:
        return "Off is best: nothing within the budget is faster.\nCACHE_ROUTE=0"
    return environment(chosen.policy)


def environment(policy: RoutePolicy) -> str:
    """`NAME=value` words that make a daemon route by `policy`."""
    values: dict[str, object] = {
        "cache_route": policy.active,
        "route_mode": policy.mode,
        "route_j": policy.j,
    }
    if policy.mode == "cache-prior":
        values["route_lambda"] = policy.lam
    elif policy.p > 0.0:
        values["route_p"] = policy.p
    else:
        values["route_m"] = policy.m
    if policy.alpha != 1.0:
        values["route_alpha"] = policy.alpha
    return " ".join(f"{SETTINGS[name].env}={SETTINGS[name].format(value)}" for name, value in values.items())


def render(stock: Candidate, candidates: Sequence[Candidate]) -> str:
    """What was measured on the real cache, as a Markdown table."""
    lines = [
        "| policy | tok/s | perplexity +% | KL to stock | top-1 % | within the budget |",
        "|---|---|---|---|---|---|",
    ]
    for each in [stock, *candidates]:
        q = each.quality
        lines.append(
            f"| {each.policy.describe()} | {each.tok_s:.2f} | {q.increase.value:.2f} | {q.kl.value:.4f} "
            f"| {q.top1.value:.1f} | {'yes' if each.within else 'no'} |"
        )
    return "\n".join(lines)


def _within(found: Quality, budget: tuple[Gate, ...]) -> bool:
    return all(verdict.passed for verdict in judge("", found, budget))
