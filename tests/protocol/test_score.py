"""SCORE: a JSON object with two texts, or two lists of token ids."""

from __future__ import annotations

import json

import pytest

from coli_server.protocol import Command, Framer, ProtocolError, Routing, ScoreText, replies


def event(data: bytes) -> Command | ProtocolError:
    (one,) = Framer().feed(data)
    assert isinstance(one, Command | ProtocolError)
    return one


def scored(text: str, options: str = "") -> Command:
    command = event(f"SCORE {options}{text}\n".encode())
    assert isinstance(command, Command), command
    return command


def refused(text: str) -> str:
    error = event(f"SCORE {text}\n".encode())
    assert isinstance(error, ProtocolError), error
    assert not error.close
    return error.code


def test_two_texts() -> None:
    command = scored('{"context": "a \\n\\u00e9", "continuation": " b"}', "id=7 cache_route=1 deadline_ms=5 ")
    assert command.score == ScoreText("a \né", " b")
    assert (command.id, command.options) == ("7", {"cache_route": True, "deadline_ms": 5})
    assert command.text == ""


def test_two_lists_of_token_ids() -> None:
    assert scored('{"context":[],"continuation":[1,20]}').score == ScoreText((), (1, 20))


def test_a_payload_may_hold_line_breaks() -> None:
    body = json.dumps({"context": "", "continuation": "x"}, indent=2).encode()
    command = event(b"SCORE bytes=%d\n%b\n" % (len(body), body))
    assert isinstance(command, Command)
    assert command.score == ScoreText("", "x")


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        '"hello"',
        "[]",
        "{}",
        '{"context": "a"}',
        '{"context": "a", "continuation": ""}',
        '{"context": [1], "continuation": []}',
        '{"context": "a", "continuation": [1]}',
        '{"context": "a", "continuation": "b", "more": 1}',
        '{"context": "a", "context": "a", "continuation": "b"}',
        '{"context": null, "continuation": "b"}',
        '{"context": [true], "continuation": [1]}',
        '{"context": [1.0], "continuation": [1]}',
        '{"context": [-1], "continuation": [1]}',
        '{"context": [1], "continuation": [2147483648]}',
        '{"context": [1], "continuation": [NaN]}',
        '{"context": "a", "continuation": "b"} more',
        '{"context": "a", "continuation": ' + "[" * 30_000,
        '{"context": "a", "continuation": ' + "9" * 5_000 + "}",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    assert refused(text) == "BAD_REQUEST"


def test_half_a_surrogate_pair_is_refused() -> None:
    assert refused('{"context": "\\ud800", "continuation": "b"}') == "BAD_UTF8"


@pytest.mark.parametrize("option", ["max=1", "temp=0", "ids=1", "stop=a", "logprobs=1", "system=a", "seed=1"])
def test_options_of_generations_are_refused(option: str) -> None:
    assert refused(option + ' {"context": "a", "continuation": "b"}') == "BAD_OPTION"


@pytest.mark.parametrize("logprob", [-0.1, -1234.5678901234567, -1e-300, 0.0])
def test_the_log_probability_reads_back_as_the_same_number(logprob: float) -> None:
    line = replies.scored(
        "1",
        logprob=logprob,
        tokens=2,
        greedy=False,
        finish="stop",
        prompt_tokens=1,
        hit_pct=0.0,
        lookups=0,
        routing=Routing(swap_pct=0.0, swaps=0, slots=0, agree=None, kl=None),
        mode="stock",
        scope="shared",
    )
    assert line.startswith(b"DONE 1 logprob=")
    words = dict(word.split("=") for word in line.decode().split()[2:])
    assert float(words["logprob"]) == logprob
    assert words["greedy"] == "0"
