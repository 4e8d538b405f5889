"""What a request gets does not depend on what else runs, cache or threads; and prompts take turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.engine import Engine, kernels
from coli_server.engine.api import Progress, SamplingOptions, TextChunk
from coli_server.engine.pacing import LEAST
from coli_server.engine.step import STOCK, Span
from coli_server.routing import RoutePolicy
from support.served import MODELS, Served

Serve = Callable[..., Served]
SESSION_SCOPE = RoutePolicy(mode="max-rank", j=1, m=6, scope="session")


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield
    kernels.setup(1)


def requests(vocab: int) -> list[dict[str, Any]]:
    """40 requests: prompts of 1 to 60 tokens; greedy and drawn, stock routing and session scope."""
    rng = np.random.default_rng(6)
    return [
        {
            "prompt": rng.integers(3, vocab, rng.integers(1, 61)).tolist(),
            "max_tokens": int(rng.integers(4, 16)),
            "session": f"s{number}",
            "policy": SESSION_SCOPE if number % 4 == 3 else RoutePolicy(mode="off"),
            "sampling": SamplingOptions(temperature=(number % 2) * 1.2, seed=number),
        }
        for number in range(40)
    ]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["glm4_moe", "olmoe", "deepseek_v2"])
def test_forty_requests_alone_and_eight_at_a_time_give_the_same(family: str, serve: Serve) -> None:
    roomy = serve(MODELS / family, max_running=8, threads=2)
    every = requests(roomy.engine.spec.vocab)
    keys = [roomy.submit(**request) for request in every]
    together = [roomy.finish(key)[1] for key in keys]
    roomy.service.stop(30)
    tight = serve(MODELS / family, max_running=1, threads=1, experts_per_layer=roomy.engine.k)
    alone = [tight.run(**request)[1] for request in every]
    assert together == alone
    assert sum(map(len, alone)) > 200


def test_prompts_are_read_in_turns(serve: Serve, tmp_path: Path) -> None:
    """A long prompt that came first does not hold up a short one; a running answer goes on meanwhile."""
    shutil.copytree(MODELS / "glm4_moe", tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    config |= {"max_position_embeddings": 2048, "eos_token_id": None}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    served = serve(tmp_path / "long", max_running=3)
    running = served.submit([5, 6, 7], 400, session="a")
    served.wait(running, TextChunk)
    long, short = (
        served.submit([9] * 600, 4, session="b"),
        served.submit([8] * 20, 4, session="c"),
    )
    served.wait(short)
    read = [event for event in served.seen.get(long, []) if isinstance(event, Progress)]
    assert all(event.done < event.total for event in read)
    assert len([event for event in served.seen[short] if isinstance(event, Progress)]) == 1, "in one piece"
    served.wait(long)
    chunks = [event.done for event in served.seen[long] if isinstance(event, Progress)]
    assert chunks[0] <= LEAST, "running sequences wait for a small piece at first"
    assert len(chunks) >= 20, "and pieces grow slowly, however fast they were read"


def test_spans_of_one_token_attend_together_as_alone() -> None:
    engine = Engine.open(MODELS / "glm4_moe")

    def sequences() -> list[Span]:
        made = []
        for length in (1, 5, 70, 33):
            sequence = engine.new_sequence(STOCK, engine.new_kv(128))
            engine.step([Span(sequence, tuple(range(3, 3 + length)), True, length)])
            made.append(Span(sequence, (7,), False, length + 1))
        return made

    alone = np.concatenate([engine.step([span]) for span in sequences()])
    np.testing.assert_array_equal(engine.step(sequences()), alone)
    engine.close()
