"""`coli bench tasks FILE...`: multiple choice by log-likelihood.

Each line of a file is a question: {"ctx": "...", "choices": ["...", ...], "gold": 0}. The model answers with
the choice that is likeliest behind the context (acc), or likeliest per character (acc_norm). With
CACHE_ROUTE=1 the questions are also answered under that policy, each choice fed one token at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coli_server.bench.command import ENGINE_SETTINGS, open_engine, positive
from coli_server.bench.served import Served, served
from coli_server.engine.scoring import split_tokens
from coli_server.engine.text import Text
from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy
from coli_server.settings import add_arguments, load, policy_arguments


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a task."""

    ctx: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Shares of right answers in percent, with standard errors; `same` is the share of answers (by acc) that
    stock routing gave too."""

    task: str
    mode: str
    questions: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float
    same: float


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="coli bench tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSONL files of questions")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N questions of each file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, (*ENGINE_SETTINGS, *ROUTING))
    arguments = parser.parse_args(list(words))
    settings = load(vars(arguments), os.environ)
    tasks = {file.stem: read_questions(file, arguments.limit) for file in arguments.files}
    policy = RoutePolicy(**policy_arguments(settings))
    engine = open_engine(settings)
    # In shared scope a request sees what others loaded: one at a time, each has the cache to itself.
    alone = policy.active and policy.scope == "shared"
    with served(engine, 1 if alone else 16) as running:
        results = [
            result
            for task, questions in tasks.items()
            for result in answer(running, engine.text, task, questions, policy)
        ]
    print(json.dumps([asdict(result) for result in results]) if arguments.json else render(results))
    return 0


def read_questions(file: Path, limit: int | None = None) -> list[Question]:
    """The questions of a JSONL file. Raises ConfigurationError naming the line that is none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read as UTF-8: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    questions = [_question(line, f"{file}:{number}") for number, line in numbered[:limit]]
    if not questions:
        raise ConfigurationError(f"{file}: has no questions")
    return questions


def answer(
    running: Served, text: Text, task: str, questions: Sequence[Question], policy: RoutePolicy
) -> list[TaskResult]:
    """Results of stock routing and, if it is another one, of `policy`."""
    pairs = [split_tokens(text, each.ctx, choice) for each in questions for choice in each.choices]
    stock = replace(policy, mode="off")
    results: list[TaskResult] = []
    reference: list[int] | None = None
    for each in [stock, policy] if policy.active else [stock]:
        scores = iter([score.logprob for score in running.score(pairs, each)])
        logprobs = [[next(scores) for _ in question.choices] for question in questions]
        given = [best(row) for row in logprobs]
        reference = reference or given
        results.append(
            grade(task, each.describe(), questions, logprobs, _share(map(int.__eq__, given, reference))[0])
        )
    return results


def grade(
    task: str, mode: str, questions: Sequence[Question], logprobs: Sequence[Sequence[float]], same: float
) -> TaskResult:
    """Compare the likeliest choices with the right ones; `logprobs` has a row a question."""
    plain, per_character = [], []
    for question, row in zip(questions, logprobs, strict=True):
        plain.append(best(row) == question.gold)
        lengths = [len(choice) for choice in question.choices]
        scaled = [logprob / length for logprob, length in zip(row, lengths, strict=True)]
        per_character.append(best(scaled) == question.gold)
    return TaskResult(task, mode, len(questions), *_share(plain), *_share(per_character), same)


def best(values: Sequence[float]) -> int:
    """The place of the greatest value, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def render(results: Sequence[TaskResult]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| task | mode | questions | acc % | acc_norm % | same answers as stock % |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.task} | {each.mode} | {each.questions} | {each.acc:.2f} ± {each.acc_stderr:.2f} "
        f"| {each.acc_norm:.2f} ± {each.acc_norm_stderr:.2f} | {each.same:.1f} |"
        for each in results
    ]
    return "\n".join(lines)


def _share(right: Any) -> tuple[float, float]:
    """Percent of true values, and its standard error (of a sample's mean)."""
    values = [bool(each) for each in right]
    share = sum(values) / len(values)
    error = math.sqrt(share * (1.0 - share) / (len(values) - 1)) if len(values) > 1 else 0.0
    return 100.0 * share, 100.0 * error


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
        ctx, choices, gold = row["ctx"], row["choices"], row["gold"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigurationError(f'{where}: is no object with "ctx", "choices" and "gold"') from None
    if not isinstance(ctx, str):
        raise ConfigurationError(f"{where}: ctx must be a string")
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(each) for each in choices):
        raise ConfigurationError(f"{where}: choices must be two or more strings that are not empty")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ConfigurationError(f"{where}: gold is {gold!r}, must be from 0 to {len(choices) - 1}")
    return Question(ctx, tuple(choices), gold)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
