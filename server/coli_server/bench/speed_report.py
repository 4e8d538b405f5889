"""Rows of `coli bench speed`: what was measured, against what, and whether it reaches its goal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """`ratio` is that of `value` to `limit` (a peer's or the machine's); `spread` least and most of value.

    Where less is better, `at_most` is true. Without a goal, or without a limit, nothing is judged.
    """

    name: str
    value: float
    limit: float | None
    ratio: float | None
    goal: float | None
    spread: tuple[float, float] | None = None
    at_most: bool = False

    @classmethod
    def against(
        cls,
        name: str,
        values: Sequence[float],
        limits: Sequence[float] | None,
        goal: float | None,
        *,
        at_most: bool = False,
    ) -> Row:
        """Medians of repeated measurements."""
        value = statistics.median(values)
        limit = None if limits is None else statistics.median(limits)
        ratio = None if limit is None else value / limit
        return cls(name, value, limit, ratio, goal, (min(values), max(values)), at_most)

    @classmethod
    def within(cls, name: str, value: float, limit: float, goal: float = 1.0) -> Row:
        """A value that may be `goal` times `limit` at most."""
        return cls(name, value, limit, value / limit, goal, at_most=True)

    @property
    def verdict(self) -> str:
        if self.goal is None or self.ratio is None:
            return "-"
        return "PASS" if (self.ratio <= self.goal if self.at_most else self.ratio >= self.goal) else "MISS"

    def cells(self) -> list[str]:
        spread = "" if self.spread is None else f" ({self.spread[0]:.4g} to {self.spread[1]:.4g})"
        goal = "-" if self.goal is None else f"{'<=' if self.at_most else '>='} {self.goal:g}"
        limit, ratio = ("-" if n is None else f"{n:.4g}" for n in (self.limit, self.ratio))
        return [self.name, f"{self.value:.4g}{spread}", limit, ratio, goal, self.verdict]


def p99(values: Sequence[float]) -> float:
    """The value that 99 % do not exceed."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


@dataclass
class Report:
    """Everything measured in one run. `failed` has the reasons of parts that could not be measured."""

    machine: str
    command: str
    peer: str | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        peer = "no peer" if self.peer is None else f"llama-cpp-python {self.peer}"
        lines = [
            f"Machine: {self.machine}; {peer}.",
            "",
            f"Command: `{self.command}`",
            "",
            "| what | Coli | peer or limit | ratio | goal | |",
            "|---|---|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(row.cells())} |" for row in self.rows]
        rates = {
            name: value
            for name, value in self.measured.items()
            if "_read" in name and isinstance(value, float)
        }
        lines += ["", *(f"* {note}" for note in self.notes)]
        lines += [f"* **{part} failed**: {reason}" for part, reason in self.failed.items()]
        lines += [f"* {name}: {value / 1e9:.2f} GB/s" for name, value in rates.items()]
        return "\n".join(lines)

    def json(self) -> str:
        content = asdict(self)
        for row, stated in zip(self.rows, content["rows"], strict=True):
            stated["verdict"] = row.verdict
        return json.dumps(content, indent=1) + "\n"
