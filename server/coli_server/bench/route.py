"""`coli bench route`: the time that choosing experts takes, as a share of a decoded token."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.engine.step import Span
from coli_server.models import ensure_default_model
from coli_server.routing import RoutePolicy, select

POLICIES = {
    "off": RoutePolicy(mode="off"),
    "max-rank": RoutePolicy(mode="max-rank"),
    "max-rank, P": RoutePolicy(mode="max-rank", p=0.9),
    "cache-prior": RoutePolicy(mode="cache-prior"),
}
LIMIT_PERCENT = 3.0
"""Of a decoded token, over all layers: what a policy may cost beyond the stock router."""


@dataclass(frozen=True, slots=True)
class RouteCost:
    """Medians over rounds. `extra_percent` is the time beyond `off` of all layers, of one decoded token."""

    policy: str
    microseconds: float
    extra_microseconds: float
    extra_percent: float


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Times of one run: `token_ms` is one decoded token with everything resident and stock routing."""

    model: str
    layers: int
    experts: int
    k: int
    token_ms: float
    costs: tuple[RouteCost, ...]


def main(words: Sequence[str]) -> int:
    """Print the table or, with --json, one JSON object; exit status 1 if a policy costs too much."""
    parser = argparse.ArgumentParser(prog="coli bench route", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", metavar="FOLDER", help="model folder (default: the default model)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to decode (100)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(list(words))
    engine = Engine.open(arguments.model or ensure_default_model())
    try:
        report = measure(engine, arguments.tokens)
    finally:
        engine.close()
    print(json.dumps(asdict(report)) if arguments.json else render(report))
    return int(any(cost.extra_percent >= LIMIT_PERCENT for cost in report.costs))


def measure(engine: Engine, tokens: int) -> RouteReport:
    """Decode `tokens` tokens and time each policy on rows of the model's shape, in turns with the others."""
    layers, experts, k = len(engine.spec.moe_layers), engine.experts, engine.k
    random = np.random.default_rng(0)
    rows = random.random((512, 1, experts), np.float32)
    resident = random.random((512, experts)) < 0.5
    rounds: dict[str, list[float]] = {name: [] for name in POLICIES}
    decode = _decoder(engine)
    token_seconds = []
    for _ in range(tokens):
        token_seconds.append(_seconds(decode))
        for name, policy in POLICIES.items():
            rounds[name].append(_seconds(_selector(rows, resident, k, policy)) / len(rows))
    token = statistics.median(token_seconds)
    # The whole selection is a few microseconds: the fastest round is the one that nothing disturbed.
    base = min(rounds["off"])
    costs = []
    for name in POLICIES:
        extra = min(rounds[name]) - base
        costs.append(RouteCost(name, min(rounds[name]) * 1e6, extra * 1e6, 100 * extra * layers / token))
    return RouteReport(engine.name, layers, experts, k, token * 1e3, tuple(costs))


def render(report: RouteReport) -> str:
    """The report as a Markdown table."""
    lines = [
        f"{report.model}: {report.layers} MoE layers, {report.k} of {report.experts} experts; "
        f"a decoded token takes {report.token_ms:.2f} ms (median)",
        "",
        "| policy | us a layer | beyond off, us a layer | of a token |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {cost.policy} | {cost.microseconds:.2f} | {cost.extra_microseconds:.2f} "
        f"| {cost.extra_percent:.2f} % |"
        for cost in report.costs
    ]
    return "\n".join(lines)


def _decoder(engine: Engine) -> Callable[[], object]:
    """A function that decodes one more token of a sequence."""
    capacity = min(engine.context_length, 512)
    sequence = engine.new_sequence(POLICIES["off"], engine.new_kv(capacity))

    def step() -> object:
        if sequence.position == capacity:
            sequence.kv.truncate(0)
        token = sequence.position * 31 % engine.spec.vocab
        return engine.step([Span(sequence, (token,), prompt=False, length=sequence.position + 1)])

    for _ in range(8):
        step()
    return step


def _selector(
    rows: NDArray[np.float32], resident: NDArray[np.bool_], k: int, policy: RoutePolicy
) -> Callable[[], object]:
    def run() -> None:
        for scores, row in zip(rows, resident, strict=True):
            select(scores, scores, row, k, policy, logits=scores)

    return run


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
