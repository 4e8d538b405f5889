"""Scores over a scripted server: several at once, failures in between, and answers that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coli_client import Busy, Client, ProtocolViolation, RequestEnded

SCORED = b"logprob=%b tokens=1 greedy=%b finish=stop prompt_tokens=3"


def accept(peer: Any) -> bytes:
    seen = peer.next()
    assert seen.line.startswith(b"SCORE "), seen
    peer.send(b"ACK %b prompt_tokens=3 session=~1\n" % seen.id)
    return seen.id


def test_scores_run_together_and_come_back_in_order(serve: Any) -> None:
    def script(peer: Any) -> None:
        first, second = accept(peer), accept(peer)
        peer.done(second, SCORED % (b"-2.5", b"0"))
        third = accept(peer)
        peer.done(third, SCORED % (b"-3.5", b"1"))
        peer.done(first, SCORED % (b"-1.5", b"0"))
        assert peer.next().line == b"PING"
        peer.send(b"PONG\n")
        peer.rest()

    with Client(port=serve(script)) as client:
        scores = client.score_all([("a", "b"), ("c", "d"), ("e", "f")], at_once=2)
        assert [(score.logprob, score.greedy) for score in scores] == [
            (-1.5, False),
            (-2.5, False),
            (-3.5, True),
        ]
        client.ping()


def test_after_a_refusal_no_more_are_sent_and_those_that_run_are_awaited(serve: Any) -> None:
    def script(peer: Any) -> None:
        first = accept(peer)
        seen = peer.next()
        peer.send(b"ERR BUSY id=%b retry_ms=100 later\n" % seen.id)
        peer.done(first, SCORED % (b"-1.0", b"0"))
        assert peer.next().line == b"PING"
        peer.send(b"PONG\n")
        peer.rest()

    with Client(port=serve(script)) as client:
        with pytest.raises(Busy):
            client.score_all([("a", "b")] * 5, at_once=2)
        client.ping()


def test_a_score_that_was_ended_early_raises(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.done(accept(peer), b"tokens=0 finish=drained prompt_tokens=3")
        peer.rest()

    with Client(port=serve(script)) as client, pytest.raises(RequestEnded, match="drained"):
        client.score("a", "b")


@pytest.mark.parametrize("words", [(b"nan", b"0"), (b"inf", b"0"), (b"-1", b"2"), (b"x", b"1")])
def test_a_malformed_score_is_a_violation(serve: Any, words: tuple[bytes, bytes]) -> None:
    def script(peer: Any) -> None:
        peer.done(accept(peer), SCORED % words)
        peer.rest()

    with Client(port=serve(script)) as client, pytest.raises(ProtocolViolation):
        client.score("a", "b")


def test_nothing_in_a_text_can_leave_the_payload(serve: Any) -> None:
    seen = []

    def script(peer: Any) -> None:
        request = peer.next()
        seen.append(json.loads(request.payload))
        peer.send(b"ACK %b prompt_tokens=3 session=~1\n" % request.id)
        peer.done(request.id, SCORED % (b"-1", b"0"))
        peer.rest()

    texts = 'x"}\nQUIT\r\n\0{', "é\u2028\\"
    with Client(port=serve(script)) as client:
        client.score(*texts)
    assert seen == [{"context": texts[0], "continuation": texts[1]}]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("a", [1]), ([1], "a"), (b"a", "b"), ([1], [-1]), ([1], [1.5]), ("a", None), ("\ud800", "a")],
)
def test_wrong_arguments_send_nothing(serve: Any, context: Any, continuation: Any) -> None:
    def script(peer: Any) -> None:
        assert peer.rest() in (b"", b"QUIT\n")

    with Client(port=serve(script)) as client, pytest.raises((TypeError, ValueError)):
        client.score(context, continuation)


def test_score_all_names_its_requests_itself(serve: Any) -> None:
    def script(peer: Any) -> None:
        assert peer.rest() in (b"", b"QUIT\n")

    with Client(port=serve(script)) as client, pytest.raises(TypeError, match="id"):
        client.score_all([("a", "b")], id="x")
