"""`coli bench cache`: what eviction policies and cache sizes are worth, replayed from a routing trace.

Record one with `coli serve --trace FILE`. Every step of the trace is replayed layer by layer: what it wants
is looked up together, then touched, as in the expert cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coli_server.bench.chart import Series, line_chart
from coli_server.engine.replay import POLICIES, accesses
from coli_server.engine.trace import PROMPT, TraceHeader, read_trace
from coli_server.errors import ConfigurationError

GRID = 8  # capacities, when none are given


@dataclass(frozen=True, slots=True)
class CacheReport:
    """`miss_percent[policy]` has a figure for each of `slots`, over all lookups of all layers.

    A lookup is one distinct expert of one step and layer. `steps` counts those of the whole model.
    """

    model: str
    layers: int
    experts: int
    k: int
    steps: int
    tokens: int
    lookups: int
    slots: tuple[int, ...]
    miss_percent: dict[str, tuple[float, ...]]


def main(words: Sequence[str]) -> int:
    """Print a table or, with --json, one JSON object; --plot writes a picture."""
    parser = argparse.ArgumentParser(
        prog="coli bench cache",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", metavar="FILE", type=Path, required=True, help="a file of --trace")
    parser.add_argument(
        "--slots", metavar="N,N,...", type=_numbers, help="experts that a layer has room for (a grid from K)"
    )
    parser.add_argument("--chosen", action="store_true", help="replay what ran, not what the router wanted")
    parser.add_argument("--prompts", action="store_true", help="replay prompt tokens too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write miss rates by size as an SVG")
    arguments = parser.parse_args(list(words))
    report = replay(
        arguments.trace,
        slots=arguments.slots,
        field="chosen" if arguments.chosen else "true",
        prompts=arguments.prompts,
    )
    if arguments.plot is not None:
        arguments.plot.write_text(plot(report), encoding="utf-8")
    print(json.dumps(asdict(report)) if arguments.json else render(report))
    return 0


def replay(
    file: Path, *, slots: Sequence[int] | None = None, field: str = "true", prompts: bool = False
) -> CacheReport:
    """Replay the trace `file` under every policy and every number of slots.

    Raises ConfigurationError for a file that is no trace or has nothing to replay, or for impossible slots.
    """
    header, records = read_trace(file)
    if not prompts:
        records = records[(records["flags"] & PROMPT) == 0]
    if not len(records):
        raise ConfigurationError(f"{file}: records no {'tokens' if prompts else 'decoded tokens'}")
    chosen = _grid(header) if slots is None else tuple(sorted(set(slots)))
    if not all(header.k <= count <= header.experts for count in chosen):
        raise ConfigurationError(f"--slots: {header.model} accepts {header.k} to {header.experts}")
    layers = accesses(records, len(header.layers), field)
    lookups = sum(len(wanted) for steps in layers for wanted in steps)
    percent = {
        name: tuple(100 * sum(count(steps, n) for steps in layers) / lookups for n in chosen)
        for name, count in POLICIES.items()
    }
    return CacheReport(
        header.model,
        len(header.layers),
        header.experts,
        header.k,
        max(len(steps) for steps in layers),
        int((records["slot"] == records["slot"][0]).sum()),
        lookups,
        chosen,
        percent,
    )


def render(report: CacheReport) -> str:
    """The report as a Markdown table of miss rates."""
    names = list(report.miss_percent)
    lines = [
        f"{report.model}: {report.layers} MoE layers, {report.k} of {report.experts} experts; "
        f"{report.tokens} tokens in {report.steps} steps, {report.lookups} lookups; misses in percent",
        "",
        "| slots a layer | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for i, slots in enumerate(report.slots):
        lines.append(
            f"| {slots} | " + " | ".join(f"{report.miss_percent[name][i]:.2f}" for name in names) + " |"
        )
    return "\n".join(lines)


def plot(report: CacheReport) -> str:
    """The miss rates as an SVG picture."""
    series = [
        Series(name, tuple(zip(map(float, report.slots), rates, strict=True)))
        for name, rates in report.miss_percent.items()
    ]
    return line_chart(f"{report.model}: misses by cache size", "slots a layer", "misses, %", series)


def _grid(header: TraceHeader) -> tuple[int, ...]:
    """From K slots to one less than all of them, evenly."""
    low, high = header.k, max(header.k, header.experts - 1)
    return tuple(sorted({low + (high - low) * i // (GRID - 1) for i in range(GRID)}))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a list of numbers such as 8,12,16") from None
