"""The client library against a real daemon, and every example of its document."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coli_client import AsyncClient, BadOption, BadRequest, Client, ContextExceeded, DuplicateId, NotFound
from coli_server.engine import Engine
from coli_server.engine.sampler import log_softmax
from coli_server.engine.scoring import split_tokens

ENDLESS = 50_000
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "CLIENT.md"


@pytest.fixture(scope="module")
def daemon(start_daemon: Any, small_model: Path) -> Iterator[Any]:
    with start_daemon("--model", str(small_model), "--experts-per-layer", "6") as running:
        yield running


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with Client(daemon.host, daemon.port) as client:
        yield client


@pytest.fixture
async def aclient(daemon: Any) -> Any:
    async with AsyncClient(daemon.host, daemon.port) as client:
        yield client


def test_every_example_of_the_document_runs(daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    examples = [example for example in examples if "models.example" not in example]
    assert len(examples) == 13
    names: dict[str, Any] = {}
    for example in examples:
        assert "7311" in example
        exec(compile(example.replace("7311", str(daemon.port)), str(DOCUMENT), "exec"), names)
    assert "cancelled\n" in capsys.readouterr().out


def test_chunks_make_the_text(client: Client) -> None:
    generation = client.generate("a b c", max=12)
    chunks = [chunk.text for chunk in generation]
    result = generation.result
    assert "".join(chunks) == result.text
    assert (result.finish, result.tokens) == ("length", 12)
    assert result.prompt_tokens == generation.ack.prompt_tokens > 0
    assert client.generate("a b c", max=12).wait().text == result.text
    line = client.stat_line()
    assert (line.tokens, line.prompt_tokens, line.length_limited) == (12, result.prompt_tokens, True)


def test_what_looks_like_commands_in_a_text_is_text(client: Client) -> None:
    before = client.stat("session").number("requests_total")
    for text in ("a\nQUIT", "x\r\nRESET\r\n", "\0", '"quoted"', "--", "bytes=5\n"):
        assert client.generate(text, max=1, stop=["\nQUIT", '"'], id="one").wait().tokens == 1
    client.ping()
    assert client.stat("session").number("requests_total") == before + 6


def test_token_ids_and_log_probabilities(client: Client) -> None:
    generation = client.generate([1, 2, 3], max=4, logprobs=2)
    tokens = [token for chunk in generation for token in chunk.logprobs]
    assert generation.ack.prompt_tokens == 3
    assert len(tokens) == 4
    for token in tokens:
        assert len(token.top) == 2
        assert (token.id, token.logprob) == (token.top[0].id, token.top[0].logprob)


def test_refusals(client: Client) -> None:
    with pytest.raises(BadOption, match="temp"):
        client.generate("x", temp=-1)
    with pytest.raises(BadRequest, match="empty"):
        client.generate("")
    with pytest.raises(ContextExceeded) as refused:
        client.generate([1] * 70_000)
    assert refused.value.prompt_tokens == 70_000
    assert refused.value.capacity is not None
    with pytest.raises(NotFound):
        client.cancel("nobody")
    client.ping()


def test_sessions_are_found_again(daemon: Any, client: Client) -> None:
    assert client.session("again").new
    client.set("max", 3)
    assert client.chat("hello").wait().tokens == 3
    with Client(daemon.host, daemon.port) as other:
        assert not other.session("again").new
        assert other.chat("hello").wait().tokens == 3
        assert other.stat("session").number("requests_total") == 2
        assert client.stat("session", "again") == other.stat("session")
        other.reset()


def test_every_section_and_every_topic(client: Client) -> None:
    for section in (None, "all", "server", "route", "cache", "latency", "settings", "session", "sessions"):
        assert client.stat(section)
    assert client.stat()["version"] == client.version().version
    assert client.version().protocol == 1
    for verb in (None, "gen", "STAT", "set"):
        assert (verb or "PING").upper() in client.help(verb)


def test_break_frees_the_daemon(client: Client) -> None:
    generation = client.generate("x", max=ENDLESS)
    for _ in generation:
        break
    assert generation.result.finish == "cancelled"
    assert generation.result.tokens < ENDLESS
    assert client.stat("session").number("requests_cancelled_total") == 1


def test_another_connection_cancels(daemon: Any, client: Client) -> None:
    client.session("shared-one")
    generation = client.generate("x", max=ENDLESS, id="long")
    with Client(daemon.host, daemon.port) as other:
        other.session("shared-one")
        with pytest.raises(DuplicateId):
            other.generate("x", id="long")
        other.cancel("long")
    assert generation.wait().finish == "cancelled"


def test_closing_frees_the_daemon(daemon: Any, client: Client) -> None:
    leaving = Client(daemon.host, daemon.port)
    leaving.session("leaving")
    leaving.generate("x", max=ENDLESS)
    leaving.close()
    client.session("leaving")
    client.reset()  # waits until nothing of the session runs
    assert client.stat("session").number("requests_cancelled_total") == 1


async def test_side_by_side_gives_what_one_by_one_gives(aclient: AsyncClient) -> None:
    prompts = ["a", "b c", "d e f", "g"]
    alone = [(await aclient.generate(prompt, max=16)).text for prompt in prompts]
    together = [aclient.generate(prompt, max=16) for prompt in prompts]
    figures = await aclient.stat()
    assert figures.number("requests_total") >= len(prompts)
    assert [(await generation).text for generation in together] == alone


PAIRS = [("The sea", " is wide"), ("a b", "c"), ([1, 2, 3], [4, 5])]


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[float]:
    """The scores of `PAIRS` from the engine's own logits."""
    engine = Engine.open(small_model, warm=False)
    scores = []
    for context, continuation in PAIRS:
        if isinstance(context, str) and isinstance(continuation, str):
            before, behind = split_tokens(engine.text, context, continuation)
        else:
            before, behind = [*context], [*continuation]  # type: ignore[list-item]
        total = 0.0
        for row, token in zip(engine.logits(before + behind)[len(before) - 1 :], behind, strict=False):
            total += float(log_softmax(row)[token])
        scores.append(total)
    engine.close()
    return scores


def test_scores_are_those_of_the_engine_to_the_last_bit(client: Client, expected: list[float]) -> None:
    assert [client.score(*pair).logprob for pair in PAIRS] == expected
    assert [score.logprob for score in client.score_all(PAIRS * 3, at_once=5)] == expected * 3
    client.ping()


async def test_scores_side_by_side(aclient: AsyncClient, expected: list[float]) -> None:
    assert (await aclient.score(*PAIRS[0])).logprob == expected[0]
    assert [score.logprob for score in await aclient.score_all(PAIRS * 3)] == expected * 3


def test_a_score_that_is_refused_leaves_the_client_usable(client: Client) -> None:
    with pytest.raises(BadOption, match="SCORE takes no option max"):
        client.score("a", "b", max=3)
    with pytest.raises(ContextExceeded):
        client.score([1] * 65_536, [1])
    with pytest.raises(BadRequest, match="no token for the beginning"):
        client.score("", "a")
    with pytest.raises(BadRequest, match="not in"):
        client.score_all([([1], [2]), ([1], [10_000_000]), ([1], [3])])
    assert client.score([1], [2]).tokens == 1


async def test_a_score_that_is_refused_cancels_the_others(aclient: AsyncClient) -> None:
    with pytest.raises(BadRequest, match="not in"):
        await aclient.score_all([([1], [2]), ([1], [10_000_000]), ([1], [3])])
    assert (await aclient.score([1], [2])).tokens == 1


async def test_a_cancelled_task_cancels_its_request(aclient: AsyncClient) -> None:
    generation = aclient.generate("x", max=ENDLESS)
    task = asyncio.create_task(generation.wait())
    await generation.accepted()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await aclient.reset()  # waits until nothing of the session runs
    assert generation.result.finish == "cancelled"


async def test_a_loop_that_is_left_cancels(aclient: AsyncClient) -> None:
    other = aclient.generate("y", max=32)
    async for _ in aclient.generate("x", max=ENDLESS):
        break
    assert (await other).finish == "length"
    await aclient.reset()
    assert (await aclient.stat("session")).number("requests_cancelled_total") == 1
