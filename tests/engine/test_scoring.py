"""SCORE in the engine: exact under stock routing, token by token under another policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.api import Failed, Finished
from coli_server.engine.sampler import log_softmax
from coli_server.engine.scoring import split_tokens
from coli_server.engine.step import Span
from coli_server.engine.text import Text, TextError
from coli_server.routing import RoutePolicy
from support.served import TINY, Served

Serve = Callable[..., Served]
IDS = [(i * 37 + 11) % 250 for i in range(90)]
ROUTED = RoutePolicy(mode="max-rank", j=1, m=8, scope="session", capacity=4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open(TINY, warm=False, experts_per_layer=4)


def stock_score(engine: Engine, ids: list[int], context: int) -> tuple[float, bool]:
    rows = engine.logits(ids)[context - 1 : -1]
    total = 0.0  # not sum(), which newer Pythons compensate
    for row, token in zip(rows, ids[context:], strict=True):
        total += float(log_softmax(row)[token])
    greedy = [int(np.argmax(row)) for row in rows] == ids[context:]
    return total, greedy


def submit(served: Served, ids: list[int], context: int, **fields: object) -> int:
    rest = tuple(ids[context:])
    return served.submit(ids[:context], len(rest), kind="score", continuation=rest, **fields)


@pytest.mark.parametrize("context", [1, 2, 25, 60, 89])
def test_a_stock_score_is_the_sum_of_log_softmax_to_the_last_bit(
    serve: Serve, engine: Engine, context: int
) -> None:
    served = serve(experts_per_layer=4)
    finished, _ = served.finish(submit(served, IDS, context))
    assert finished.score is not None
    assert (finished.score.logprob, finished.score.greedy) == stock_score(engine, IDS, context)
    assert (finished.finish, finished.tokens, finished.prompt_tokens) == ("stop", 90 - context, context)
    assert finished.counters.lookups == finished.counters.generated_tokens_total == 0


def test_a_greedy_continuation_is_said_to_be_greedy(serve: Serve, engine: Engine) -> None:
    served = serve()
    ids = IDS[:10] + engine.generate(IDS[:10], 6, ignore_eos=True)
    finished, _ = served.finish(submit(served, ids, 10))
    assert finished.score is not None
    assert finished.score.greedy
    finished, _ = served.finish(submit(served, [*ids[:-1], (ids[-1] + 1) % 250], 10))
    assert finished.score is not None
    assert not finished.score.greedy


def test_scores_that_run_together_equal_scores_alone(serve: Serve, engine: Engine) -> None:
    served = serve(max_running=16)
    wanted = [(length, context) for length in (12, 40, 90) for context in (1, 5, 11)]
    generation = served.submit(IDS[:20], 12)
    keys = {submit(served, IDS[:length], context): (length, context) for length, context in wanted}
    for key, (length, context) in keys.items():
        finished, _ = served.finish(key)
        assert finished.score is not None
        assert (finished.score.logprob, finished.score.greedy) == stock_score(engine, IDS[:length], context)
    assert isinstance(served.wait(generation), Finished)


def test_choices_of_one_context_read_it_once(serve: Serve) -> None:
    served = serve()
    first, _ = served.finish(submit(served, IDS[:50], 48))
    second, _ = served.finish(submit(served, [*IDS[:48], 7, 8], 48))
    per_token = first.counters.prefill_lookups // 49
    assert first.counters.prefill_lookups == 49 * per_token
    assert second.counters.prefill_lookups == 2 * per_token


def test_a_routed_score_feeds_one_token_at_a_time_under_the_policy(serve: Serve, engine: Engine) -> None:
    served = serve(experts_per_layer=4)
    finished, _ = served.finish(submit(served, IDS, 30, policy=ROUTED))
    assert finished.score is not None

    sequence = engine.new_sequence(ROUTED, engine.new_kv(len(IDS)))
    row = engine.step([Span(sequence, tuple(IDS[:30]), True, 90)])[-1]
    total = 0.0
    for position in range(30, 90):
        total += float(log_softmax(row)[IDS[position]])
        if position < 89:
            row = engine.step([Span(sequence, (IDS[position],), False, position + 1)])[0]
    assert finished.score.logprob == total
    assert finished.score.logprob != stock_score(engine, IDS, 30)[0]
    assert finished.counters.route_swaps == sequence.counters.route_swaps > 0
    assert finished.counters.route_slots == sequence.counters.route_slots


def test_a_cancelled_score_has_none(serve: Serve) -> None:
    served = serve(max_running=1)
    running = submit(served, IDS, 1, policy=ROUTED)
    waiting = submit(served, IDS, 30)
    served.service.cancel(waiting)
    event = served.wait(waiting)
    assert isinstance(event, Finished)
    assert (event.finish, event.score, event.tokens) == ("cancelled", None, 0)
    assert not isinstance(served.wait(running), Failed)


class TestSplit:
    """A text of bytes `a`, `b` and the merged token `ab`; `<s>` begins it."""

    TOKENIZER: ClassVar = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3}, "merges": [["a", "b"]]},
    }  # fmt: skip

    def text(self, **config: object) -> Text:
        return Text(json.dumps(self.TOKENIZER), config, None)

    def test_the_border_of_tokens(self) -> None:
        assert split_tokens(self.text(), "ab", "ba") == ([2], [1, 0])

    def test_a_token_that_spans_the_border_belongs_to_the_continuation(self) -> None:
        assert split_tokens(self.text(), "ba", "b") == ([1], [2])

    def test_behind_an_empty_context_stands_the_beginning(self) -> None:
        added = self.text(bos_token="<s>", add_bos_token=True)
        named = self.text(bos_token="<s>")
        ended = self.text(eos_token={"content": "<s>"})
        for text in (added, named, ended):
            assert split_tokens(text, "", "ba") == ([3], [1, 0])
        assert split_tokens(named, "a", "b") == ([3], [2])  # nothing of the context is left
        with pytest.raises(TextError, match="no token for the beginning"):
            split_tokens(self.text(), "", "a")
