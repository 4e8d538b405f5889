"""The time of a decoded token that is spent outside kernels."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from coli_server.bench.speed_program import coli
from coli_server.bench.speed_report import Report, Row
from coli_server.bench.speed_streams import prompt_ids
from coli_server.errors import ModelError

ROUNDS, TOKENS, PROMPT = 5, 32, 16
GOAL = 10.0  # percent


def overhead(report: Report, name: str, folder: Path, ram: str, threads: int) -> None:
    """Steps of one token with everything in memory, with a clock around kernels and without, in turns."""
    plain: list[dict[str, Any]] = []
    clocked: list[dict[str, Any]] = []
    with coli(folder, threads, "--ram", ram) as ours:
        if not ours.ask(do="load")["complete"]:
            raise ModelError(f"{folder}: --ram {ram} does not hold all experts")
        for number in range(ROUNDS + 1):
            ids = prompt_ids(PROMPT + TOKENS, number)
            for task, answers in (("decode", plain), ("clocked", clocked)):
                ours.ask(do="prefill", ids=ids[:PROMPT])
                answers.append(ours.ask(do=task, ids=ids[PROMPT:]))
        served = ours.ask(do="serve", prompts=prompt_ids(ROUNDS, 0), tokens=TOKENS)["answers"]
    plain, clocked = plain[1:], clocked[1:]  # the first ones warm the processor up
    report.measured[f"overhead of the {name}"] = {"plain": plain, "clocked": clocked, "served": served}
    report.rows += [
        _row(f"{name}: share of a decoded token outside kernels, %", clocked),
        _row(f"{name}: the same with drawing, text and events of the service, %", served),
        Row.against(
            f"{name}: kernel calls a token", [answer["calls"] / TOKENS for answer in clocked], None, None
        ),
        Row.against(
            f"{name}: a token with the clock against without, ms",
            [1000 * answer["seconds"] / TOKENS for answer in clocked],
            [1000 * answer["seconds"] / TOKENS for answer in plain],
            None,
        ),
    ]


def _row(name: str, answers: list[dict[str, Any]]) -> Row:
    shares = [100 * (1 - answer["kernels"] / answer["seconds"]) for answer in answers]
    median = statistics.median(shares)
    return Row(name, median, GOAL, median / GOAL, 1.0, (min(shares), max(shares)), at_most=True)
