"""The examples of docs/PROTOCOL.md: what they send is understood so, what they show is well formed."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from coli_server.protocol import Command, Framer, ProtocolError, Routing, Summary, replies

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/PROTOCOL.md").read_text("utf-8")
BLOCKS = [
    textwrap.dedent(block).splitlines()
    for block in re.findall(r"^ *```\n(.*?)^ *```$", DOCUMENT, re.DOTALL | re.MULTILINE)
]
DIALOGUES = [block for block in BLOCKS if any(line.startswith("> ") for line in block)]
LAST_LINES = re.compile(r"(PONG|VERSION|OK|END|RESET|DONE|ERR)\b")


def sent(block: list[str]) -> bytes:
    return "".join(line.removeprefix("> ") + "\n" for line in block if line.startswith("> ")).encode()


def received(block: list[str]) -> list[str]:
    return [line for line in block if not line.startswith("> ")]


def test_there_are_examples() -> None:
    assert len(DIALOGUES) >= 8


@pytest.mark.parametrize("block", DIALOGUES, ids=lambda block: block[0])
def test_each_command_of_an_example_has_one_last_line(block: list[str]) -> None:
    events = Framer().feed(sent(block))
    assert len(events) == sum(LAST_LINES.match(line) is not None for line in received(block))


@pytest.mark.parametrize("block", DIALOGUES, ids=lambda block: block[0])
def test_the_errors_of_an_example_are_those_of_the_parser(block: list[str]) -> None:
    errors = [event for event in Framer().feed(sent(block)) if isinstance(event, ProtocolError)]
    lines = [replies.error(error.code, error.message, id=error.id).decode().rstrip() for error in errors]
    assert lines == [line for line in received(block) if line.startswith("ERR ")]


@pytest.mark.parametrize("block", DIALOGUES, ids=lambda block: block[0])
def test_the_lines_of_a_generation_have_their_form(block: list[str]) -> None:
    for line in received(block):
        verb, _, rest = line.partition(" ")
        if verb == "TOK":
            assert isinstance(json.loads(rest.partition(" ")[2]), str)
        elif verb == "DONE" and " logprob=" in line:
            assert re.findall(r" ([a-z_]+)=", line) == WORDS_OF_SCORE
        elif verb == "DONE":
            assert re.findall(r" ([a-z_]+)=", line) in (WORDS_OF_DONE, WORDS_WITHOUT_METERS)


def _words_of_done(agree: float | None, kl: float | None) -> list[str]:
    routing = Routing(swap_pct=0.0, swaps=0, slots=0, agree=agree, kl=kl)
    line = replies.done("1", Summary("stop", 1, 1, 0, 1.0, 1.0, 0.0, 0, routing, "stock", "shared"))
    return re.findall(r" ([a-z_]+)=", line.decode())


def _words_of_score() -> list[str]:
    line = replies.scored(
        "1",
        logprob=-1.0,
        tokens=1,
        greedy=True,
        finish="stop",
        prompt_tokens=1,
        hit_pct=0.0,
        lookups=0,
        routing=Routing(swap_pct=0.0, swaps=0, slots=0, agree=None, kl=None),
        mode="stock",
        scope="shared",
    )
    return re.findall(r" ([a-z_]+)=", line.decode())


WORDS_OF_SCORE = _words_of_score()
WORDS_OF_DONE = _words_of_done(100.0, 0.0)
WORDS_WITHOUT_METERS = _words_of_done(None, None)


def test_every_word_of_done_is_explained() -> None:
    table = DOCUMENT[DOCUMENT.index("| word of `DONE`") : DOCUMENT.index("If `max` is more")]
    explained = re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row))
    assert explained == WORDS_OF_DONE


def test_single_commands_in_the_document_are_understood() -> None:
    lines = [line for block in BLOCKS for line in block if re.match(r"(GEN|CHAT) ", line)]
    lines += re.findall(r"`(GEN [^`]+|SET (?:stop|system) [^`]+)`", DOCUMENT)
    lines = [line for line in lines if "[option" not in line and "<" not in line]
    assert len(lines) >= 6
    for line in lines:
        (event,) = Framer().feed(line.encode() + b"\n")
        assert isinstance(event, Command), line
    piped = re.findall(r"printf '(.*?)'", DOCUMENT)
    for text in (text for text in piped if text != "..."):
        events = Framer().feed(text.replace("\\n", "\n").encode())
        assert events
        assert all(isinstance(event, Command) for event in events)


def test_half_a_surrogate_pair_is_refused_as_the_document_says() -> None:
    assert r'`"\ud800"`) is `ERR BAD_UTF8`' in DOCUMENT.replace("\n   ", " ")
    (event,) = Framer().feed(b'GEN "\\ud800"\n')
    assert isinstance(event, ProtocolError)
    assert event.code == "BAD_UTF8"
