"""`coli bench free`: what the model writes under a policy, beside what it writes under stock routing.

Scoring a fixed text cannot show a model that begins to go round in circles, and such a model hits the cache
nicely. So both continue the same prompts, greedily and by sampling, and the texts are compared: how much
repeats, how many different n-grams there are, how long they are, how likely stock routing finds them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from coli_server.bench.command import ENGINE_SETTINGS, add_text_arguments, open_engine, positive, text_windows
from coli_server.bench.served import Continuation, Served, served
from coli_server.bench.windows import Window
from coli_server.engine import figures as ratios
from coli_server.engine.api import SamplingOptions
from coli_server.engine.figures import Counters
from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy
from coli_server.settings import add_arguments, load, policy_arguments

REPEAT = 4
"""Tokens of a sequence that counts as a repetition when it occurs again in the same text."""

MARGIN = 2.0
"""Percentage points of repetition beyond stock's that make a policy worse."""

WAYS = {"greedy": 0.0, "sampled": 0.8}
"""Temperatures."""


@dataclass(frozen=True, slots=True)
class FreeResult:
    """What one policy wrote in one way.

    repetition   percent of 4-token sequences that occurred before in the same text
    distinct     percent of 1-, 2- and 3-token sequences, of all texts together, that differ
    perplexity   of the texts under stock routing: low is not good by itself, a loop is easy to guess
    """

    mode: str
    way: str
    tokens: int
    length: float
    repetition: float
    distinct: tuple[float, float, float]
    perplexity: float
    hit_pct: float
    swap_pct: float
    worse: bool


def main(words: Sequence[str]) -> int:
    """Print the table; exit status 1 if the policy repeats itself more than stock routing does."""
    parser = argparse.ArgumentParser(
        prog="coli bench free",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_text_arguments(parser, windows=32, window=32)
    parser.add_argument(
        "--tokens", type=positive, default=128, metavar="N", help="longest continuation (128)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, (*ENGINE_SETTINGS, *(name for name in ROUTING if name != "cache_route")))
    arguments = parser.parse_args(list(words))
    settings = load(vars(arguments), os.environ)
    policy = RoutePolicy(**policy_arguments(settings))
    if not policy.active:
        policy = replace(policy, mode="max-rank")
    engine = open_engine(settings)
    prompts = text_windows(engine, arguments)
    # In shared scope a request sees what others loaded: one at a time, each has the cache to itself.
    with served(engine, 1 if policy.scope == "shared" else 16) as running:
        results = compare(running, prompts, arguments.tokens, policy)
    print(json.dumps([asdict(result) for result in results]) if arguments.json else render(results))
    return int(any(result.worse for result in results))


def compare(running: Served, prompts: Sequence[Window], tokens: int, policy: RoutePolicy) -> list[FreeResult]:
    """Continue every prompt by up to `tokens` tokens under stock routing and under `policy`."""
    results: list[FreeResult] = []
    for way, temperature in WAYS.items():
        sampling = [SamplingOptions(temperature=temperature, seed=seed) for seed in range(len(prompts))]
        stock: FreeResult | None = None
        for each in (replace(policy, mode="off", agree=True), policy):
            texts = running.generate(prompts, tokens, each, sampling)
            pairs = [(p, t.ids) for p, t in zip(prompts, texts, strict=True) if t.ids]
            logprob = sum(score.logprob for score in running.score(pairs, replace(policy, mode="off")))
            result = _result(each.describe(), way, texts, logprob, stock)
            stock = stock or result
            results.append(result)
    return results


def repetition(ids: Sequence[int]) -> tuple[int, int]:
    """How many sequences of `REPEAT` tokens occurred before, and how many there are."""
    grams = _grams(ids, REPEAT)
    return len(grams) - len(set(grams)), len(grams)


def render(results: Sequence[FreeResult]) -> str:
    """The results as a Markdown table, and a line for each that is worse."""
    lines = [
        "| decoding | mode | tokens a text | repetition % | distinct 1/2/3 % | perplexity under stock "
        "| hit % | swap % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        distinct = " / ".join(f"{share:.1f}" for share in each.distinct)
        lines.append(
            f"| {each.way} | {each.mode} | {each.length:.1f} | {each.repetition:.1f} | {distinct} "
            f"| {each.perplexity:.2f} | {each.hit_pct:.1f} | {each.swap_pct:.1f} |"
        )
    lines += [
        f"{each.mode}, {each.way}: WORSE, it repeats itself more than stock routing does"
        for each in results
        if each.worse
    ]
    return "\n".join(lines)


def _result(
    mode: str, way: str, texts: Sequence[Continuation], logprob: float, stock: FreeResult | None
) -> FreeResult:
    total = Counters()
    for text in texts:
        total.add(text.end.counters)
    tokens = sum(len(text.ids) for text in texts)
    repeats = [repetition(text.ids) for text in texts]
    repeated = ratios.percent(sum(again for again, _ in repeats), sum(count for _, count in repeats))
    return FreeResult(
        mode,
        way,
        tokens,
        tokens / len(texts),
        repeated,
        (_distinct(texts, 1), _distinct(texts, 2), _distinct(texts, 3)),
        math.exp(-logprob / tokens) if tokens else math.nan,
        ratios.hit_pct(total),
        ratios.swap_pct(total),
        stock is not None and repeated > stock.repetition + MARGIN,
    )


def _distinct(texts: Sequence[Continuation], n: int) -> float:
    grams = [gram for text in texts for gram in _grams(text.ids, n)]
    return ratios.percent(len(set(grams)), len(grams))


def _grams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]
