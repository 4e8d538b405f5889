"""`coli bench lm_eval`: tasks of the package lm-eval on a running daemon.

    coli bench lm_eval --connect 127.0.0.1:7311 --tasks my_task --include-path tasks --option cache_route=1

Needs the extra `lm-eval`. The model is also registered there as `coli`: a program that imports this module
can name it, with `model_args="host=127.0.0.1,port=7311"`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from coli_client import AsyncClient, Client, ContextExceeded
from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING
from coli_server.settings import Listen

AT_ONCE = 8
MAX_TOKENS = 256
MAX_STOPS = 4  # of the protocol; what follows further ones is cut off here


@register_model("coli")  # type: ignore[untyped-decorator, unused-ignore]
class ColiLM(LM):  # type: ignore[misc, unused-ignore]
    """A Coli daemon as a model of lm-eval. `options` go with every request, for example `cache_route`.

    Log-likelihoods are those of SCORE: by stock routing, unless the options say otherwise.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 7311, **options: Any) -> None:
        super().__init__()
        self._place = (host, int(port))
        self._options = options

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability, and whether it is the greedy one."""
        with Client(*self._place) as client:
            scores = client.score_all([request.args for request in requests], **self._options)
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """For each (text,): its log-probability. A text longer than the model's context is scored in pieces,
        each behind the end of the one before it."""
        with Client(*self._place) as client:
            return [self._rolling(client, "", request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """For each (context, options): what the model writes before the first of the options' `until`."""
        return asyncio.run(self._generate_all([request.args for request in requests]))

    def _rolling(self, client: Client, context: str, text: str) -> float:
        if not text:
            return 0.0
        try:
            return client.score(context, text, **self._options).logprob
        except ContextExceeded:
            if len(text) < 2:
                raise
        middle = len(text) // 2
        blank = text.find(" ", middle)
        left, right = (text[:blank], text[blank:]) if blank > 0 else (text[:middle], text[middle:])
        return self._rolling(client, context, left) + self._rolling(client, left[-len(left) // 4 :], right)

    async def _generate_all(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with AsyncClient(*self._place) as client:

            async def run(context: str, asked: Mapping[str, Any]) -> str:
                stops = _stops(asked)
                async with gate:
                    result = await client.generate(context, **_generation(asked, stops), **self._options)
                return min((result.text.split(stop)[0] for stop in stops), key=len, default=result.text)

            return list(await asyncio.gather(*(run(context, options) for context, options in asked)))


def main(words: Sequence[str]) -> int:
    """Print lm-eval's table, or its results as JSON."""
    parser = argparse.ArgumentParser(
        prog="coli bench lm_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--connect", default="127.0.0.1:7311", metavar="ADDRESS", help="the daemon")
    parser.add_argument("--tasks", required=True, metavar="LIST", help="names with commas between them")
    parser.add_argument("--include-path", metavar="FOLDER", help="more tasks, as YAML files")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N documents of each task")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a routing option for every request, by its name in the protocol",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(list(words))
    try:
        address = Listen().parse(arguments.connect)
    except ValueError:
        raise ConfigurationError(
            f"--connect={arguments.connect}: must be HOST:PORT, PORT or unix:PATH"
        ) from None
    host = address.host if address.path is None else f"unix:{address.path}"
    results = simple_evaluate(
        model=ColiLM(host, address.port, **dict(map(_option, arguments.option))),
        tasks=arguments.tasks.split(","),
        task_manager=TaskManager(include_path=arguments.include_path),
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
    )
    if arguments.json:
        print(json.dumps(results["results"]))
    else:
        print(make_table(results))
    return 0


def _option(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name not in ROUTING:
        raise ConfigurationError(f"--option={word}: must be one of {', '.join(ROUTING)}, with a value")
    try:
        parsed = ROUTING[name].parse(value)
    except ValueError as error:
        raise ConfigurationError(f"--option={word}: {error}") from None
    return name, "auto" if parsed is None else parsed


def _stops(asked: Mapping[str, Any]) -> list[str]:
    until = asked.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _generation(asked: Mapping[str, Any], stops: list[str]) -> dict[str, Any]:
    """Protocol options for lm-eval's generation options. Greedy, unless sampling is asked for."""
    options: dict[str, Any] = {"max": int(asked.get("max_gen_toks", MAX_TOKENS))}
    if stops:
        options["stop"] = stops[:MAX_STOPS]
    if asked.get("do_sample", False):
        options["temp"] = float(asked.get("temperature", 1.0))
        options |= {name: asked[name] for name in ("top_p", "top_k", "min_p") if name in asked}
    return options
