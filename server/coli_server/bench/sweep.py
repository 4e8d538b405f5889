"""`coli bench sweep`: what each routing policy saves and what it costs, over grids of its settings.

The three policies are max-rank (J x M), cumulative threshold (J x P) and cache-prior (J x lambda), each for
several sizes of the cache. All of it runs on logical caches, which begin empty with each window, so neither
the disk nor the size of memory matters to the figures. `--preset paper` is the protocol of arXiv:2412.00099:
windows of 1,024 tokens, half of the experts of a layer in the cache, J = 1 or 2.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coli_server.bench.command import (
    ENGINE_SETTINGS,
    add_text_arguments,
    open_engine,
    show_progress,
    text_windows,
)
from coli_server.bench.decode import WindowRun, decode_in_lockstep
from coli_server.bench.summary import Quality, quality
from coli_server.bench.sweep_plot import plot
from coli_server.bench.trace import Choices, belady_misses, lru_misses
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.engine import figures as ratios
from coli_server.engine.figures import Counters
from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy
from coli_server.settings import add_arguments, load

PRESETS: dict[str, dict[str, Any]] = {
    "wide": {"windows": 4, "window": 512, "cache": "25,50,75"},
    "paper": {"windows": 8, "window": 1024, "cache": "50", "j": "1,2"},
}
METHODS = ("max-rank", "cumulative", "cache-prior")
WITHIN = 1.0
"""Percent of perplexity: the price at which a saving counts as nearly free."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Values to combine. `m` as ranks; `cache` in percent of a layer's experts."""

    j: tuple[int, ...]
    m: tuple[int, ...]
    p: tuple[float, ...]
    alpha: tuple[float, ...]
    lam: tuple[float, ...]
    cache: tuple[float, ...]

    def policies(self, capacity: int) -> list[RoutePolicy]:
        """Every policy of the grid, on a logical cache of `capacity` experts a layer."""
        common: dict[str, Any] = {"scope": "session", "capacity": capacity}
        policies = []
        for j in self.j:
            for alpha in self.alpha:
                policies += [RoutePolicy("max-rank", j, m, alpha=alpha, **common) for m in self.m]
                policies += [RoutePolicy("max-rank", j, p=p, alpha=alpha, **common) for p in self.p]
                policies += [
                    RoutePolicy("cache-prior", j, alpha=alpha, lam=lam, **common) for lam in self.lam
                ]
        return policies


@dataclass(frozen=True, slots=True)
class Point:
    """One policy on one size of cache. Miss rates in percent of lookups; `saved` in percent of stock's."""

    method: str
    mode: str
    capacity: int
    miss_pct: float
    saved_pct: float
    swap_pct: float
    quality: Quality


@dataclass(frozen=True, slots=True)
class Panel:
    """One size of cache: the stock router under LRU and under Belady's optimum, and all policies."""

    capacity: int
    cache_pct: float
    stock_miss_pct: float
    belady_miss_pct: float
    stock_perplexity: float
    points: tuple[Point, ...]
    front: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class SweepReport:
    model: str
    experts: int
    k: int
    windows: int
    window: int
    panels: tuple[Panel, ...]


def main(words: Sequence[str]) -> int:
    """Print the best points; write all of them where --out says."""
    arguments = _parse(words)
    engine = open_engine(load(vars(arguments), os.environ), all_resident=True)
    try:
        grid = _grid(arguments, engine)
        windows = text_windows(engine, arguments)
        report = sweep(engine, windows, grid)
    finally:
        engine.close()
    if arguments.out:
        write(report, arguments.out)
    print(json.dumps(asdict(report)) if arguments.json else render(report))
    return 0


def sweep(engine: Engine, windows: Sequence[Window], grid: Grid) -> SweepReport:
    """Decode all windows under every policy of the grid."""
    capacities = _capacities(grid, engine)
    policies = [policy for capacity in capacities for policy in grid.policies(capacity)]
    stock, runs = decode_in_lockstep(engine, windows, policies, show_progress)
    found = iter(zip(policies, runs, strict=True))
    panels = []
    for capacity, percent in capacities.items():
        lookups = sum(choices.size for choices in stock)
        missed = sum(lru_misses(choices, engine.experts, capacity) for choices in stock)
        best = sum(belady_misses(choices, engine.experts, capacity) for choices in stock)
        points = tuple(
            _point(*next(found), engine.experts, capacity, ratios.percent(missed, lookups))
            for _ in grid.policies(capacity)
        )
        panels.append(
            Panel(
                capacity,
                percent,
                ratios.percent(missed, lookups),
                ratios.percent(best, lookups),
                _stock_perplexity(points),
                points,
                pareto_front(points),
            )
        )
    length = len(windows[0])
    return SweepReport(engine.name, engine.experts, engine.k, len(windows), length, tuple(panels))


def pareto_front(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in both misses and perplexity, cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (each.quality.increase.value, each.miss_pct)):
        if not front or point.miss_pct < front[-1].miss_pct:
            front.append(point)
    return tuple(front)


def best_within(points: Iterable[Point], increase: float) -> Point | None:
    """The point with the fewest misses whose perplexity rises by `increase` percent at most."""
    allowed = [point for point in points if point.quality.increase.value <= increase]
    return min(allowed, key=lambda point: point.miss_pct, default=None)


def write(report: SweepReport, prefix: Path) -> None:
    """`prefix`.csv with a row a point, `prefix`.json with everything, `prefix`.svg with the plots."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".json").write_text(json.dumps(asdict(report), indent=1) + "\n", "utf-8")
    prefix.with_suffix(".svg").write_text(plot(report), "utf-8")
    with prefix.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_COLUMNS)
        for panel in report.panels:
            rows.writerows(_row(panel, point) for point in panel.points)


_COLUMNS = (
    "capacity", "method", "mode", "miss_pct", "stock_miss_pct", "belady_miss_pct", "saved_pct", "swap_pct",
    "perplexity", "increase_pct", "increase_low", "increase_high", "kl", "top1_pct", "on_front",
)  # fmt: skip


def _row(panel: Panel, point: Point) -> list[object]:
    q = point.quality
    figures = [point.miss_pct, panel.stock_miss_pct, panel.belady_miss_pct, point.saved_pct, point.swap_pct]
    figures += [
        q.perplexity.value,
        q.increase.value,
        q.increase.low,
        q.increase.high,
        q.kl.value,
        q.top1.value,
    ]
    return [
        panel.capacity,
        point.method,
        point.mode,
        *(f"{figure:.5f}" for figure in figures),
        int(point in panel.front),
    ]


def render(report: SweepReport) -> str:
    """A table of each panel's front, and each method's best point that is nearly free."""
    lines = [
        f"{report.model}: {report.k} of {report.experts} experts; {report.windows} windows of "
        f"{report.window} tokens, the cache empty at the start of each"
    ]
    for panel in report.panels:
        lines += [
            "",
            f"Cache of {panel.capacity} experts a layer: stock routing misses {panel.stock_miss_pct:.1f} % "
            f"of lookups under LRU, {panel.belady_miss_pct:.1f} % under the best possible eviction (Belady).",
            "",
            *_table(panel.front),
            "",
            f"Fewest misses within {WITHIN:g} % of perplexity:",
            "",
            *_verdicts(panel),
        ]
    return "\n".join(lines)


def _table(points: Iterable[Point]) -> list[str]:
    lines = [
        "| policy | misses % | saved % | swaps % | perplexity +% | KL to stock | top-1 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        q = point.quality
        lines.append(
            f"| {point.mode} | {point.miss_pct:.1f} | {point.saved_pct:.1f} | {point.swap_pct:.1f} "
            f"| {q.increase.value:.2f} [{q.increase.low:.2f}, {q.increase.high:.2f}] | {q.kl.value:.4f} "
            f"| {q.top1.value:.1f} |"
        )
    return lines


def _verdicts(panel: Panel) -> list[str]:
    lines = []
    for method in METHODS:
        points = [point for point in panel.points if point.method == method]
        best = best_within(points, WITHIN)
        if not points:
            continue
        if best is None:
            lines.append(f"* {method}: none of its {len(points)} settings")
            continue
        halved = "by half or more" if best.saved_pct >= 50.0 else "by less than half"
        lines.append(
            f"* {method}: {best.miss_pct:.1f} % ({best.saved_pct:.1f} % fewer: {halved}) "
            f"at {best.quality.increase.value:+.2f} %, {best.mode}"
        )
    return lines


def _point(
    policy: RoutePolicy, runs: list[WindowRun], experts: int, capacity: int, stock_pct: float
) -> Point:
    choices: list[Choices] = [run.choices for run in runs]
    lookups = sum(each.size for each in choices)
    misses = sum(lru_misses(each, experts, capacity) for each in choices)
    total = Counters()
    for run in runs:
        total.add(run.counters)
    missed = ratios.percent(misses, lookups)
    saved = ratios.percent(stock_pct - missed, stock_pct)
    method = "cumulative" if policy.mode == "max-rank" and policy.p > 0.0 else policy.mode
    return Point(method, policy.describe(), capacity, missed, saved, ratios.swap_pct(total), quality(runs))


def _stock_perplexity(points: Sequence[Point]) -> float:
    figures = points[0].quality
    return figures.perplexity.value / (1.0 + figures.increase.value / 100.0)


def _capacities(grid: Grid, engine: Engine) -> dict[int, float]:
    """Experts a layer for each share of the cache, never under K; shares that give the same are one."""
    capacities: dict[int, float] = {}
    for percent in grid.cache:
        capacities.setdefault(max(engine.k, round(engine.experts * percent / 100.0)), percent)
    return capacities


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="coli bench sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="wide", help="what is not said (wide)")
    add_text_arguments(parser, windows=4, window=512)
    for name, meaning in _LISTS.items():
        parser.add_argument(f"--{name}", metavar="LIST", help=meaning)
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.csv, .json and .svg")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, ENGINE_SETTINGS)
    chosen = next((word for at, word in enumerate(words) if at and words[at - 1] == "--preset"), "wide")
    parser.set_defaults(**PRESETS.get(chosen, {}))
    return parser.parse_args(list(words))


_LISTS = {
    "j": "values of ROUTE_J (0, 1, 2 and half of K)",
    "m": "values of ROUTE_M (four, evenly from K to all experts)",
    "p": "values of ROUTE_P (0.7,0.8,0.9,0.95)",
    "alpha": "values of ROUTE_ALPHA (1)",
    "lambda": "values of ROUTE_LAMBDA (0.02,0.05,0.1,0.2,0.4)",
    "cache": "sizes of the cache in percent of a layer's experts (25,50,75)",
}


def _grid(arguments: argparse.Namespace, engine: Engine) -> Grid:
    k, experts = engine.k, engine.experts
    steps = sorted({k + round((experts - k) * quarter / 4) for quarter in (1, 2, 3, 4)})
    defaults = {
        "j": ",".join(map(str, sorted({0, 1, 2, k // 2}))),
        "m": ",".join(map(str, steps)),
        "p": "0.7,0.8,0.9,0.95",
        "alpha": "1",
        "lambda": "0.02,0.05,0.1,0.2,0.4",
        "cache": "25,50,75",
    }
    values = {name: _numbers(name, getattr(arguments, name) or defaults[name]) for name in _LISTS}
    return Grid(values["j"], values["m"], values["p"], values["alpha"], values["lambda"], values["cache"])


def _numbers(name: str, words: str) -> tuple[Any, ...]:
    """Numbers with commas between them; an empty list leaves a method out."""
    accepted = ROUTING.get(f"route_{name}")
    try:
        if accepted is None:
            numbers = [float(word) for word in words.split(",")]
            if not all(0.0 < number <= 100.0 for number in numbers):
                raise ValueError("must be numbers in (0, 100]")
            return tuple(numbers)
        return tuple(accepted.parse(word) for word in words.split(",") if word != "none")
    except ValueError as error:
        raise ConfigurationError(f"--{name}={words}: {error}") from None
