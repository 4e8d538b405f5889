"""Whatever a caller passes, the bytes of one call hold exactly one command, and it says what was meant."""

from __future__ import annotations

import json
import re
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_client import commands
from coli_server.protocol.commands import Command
from coli_server.protocol.framer import Framer

HOSTILE = [
    "\r\nQUIT",
    "\nRESET\n",
    "\0",
    "a b",
    "x\nbytes=3",
    '"',
    "\\",
    "--",
    "\u2028PING",
    "id=2",
    "\x85",
    "é",
]

texts = st.one_of(st.text(), st.sampled_from(HOSTILE), st.lists(st.sampled_from(HOSTILE)).map("".join))
values = st.one_of(
    texts,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.lists(texts, max_size=5),
)
names = st.one_of(st.sampled_from(sorted(commands.Options.__annotations__)), texts)
numbers = st.integers(-(2**63), 2**64 - 1)
plausible = st.fixed_dictionaries(
    {},
    optional={
        "id": st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
        "max": numbers,
        "temp": st.floats(allow_nan=False, allow_infinity=False) | numbers,
        "route_lambda": st.floats(allow_nan=False, allow_infinity=False),
        "stop": texts | st.lists(texts, max_size=4),
        "system": texts,
        "route_mode": texts,
        "cache_route": st.booleans(),
    },
)
options = plausible | st.dictionaries(names, values, max_size=6)


class LyingStr(str):
    """A text that shows another face wherever Python asks it for one."""

    def __str__(self) -> str:
        return "1\nQUIT"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return "1\nQUIT"

    def encode(self, *_: Any, **__: Any) -> bytes:
        return b"1\nQUIT"


class LyingInt(int):
    def __str__(self) -> str:
        return "1\nQUIT"

    __repr__ = __str__

    def __int__(self) -> int:
        return 1

    def __format__(self, spec: str) -> str:
        return "1\nQUIT"


class LyingFloat(float):
    def __str__(self) -> str:
        return "1\nQUIT"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return "1\nQUIT"


class Level(IntEnum):
    LOW = 3


def take_one(data: bytes) -> tuple[str, list[tuple[str, str]], str, bytes | None]:
    """Verb, options with decoded values, other words and payload of the one command that `data` must be."""
    line, newline, after = data.partition(b"\n")
    assert newline
    assert re.fullmatch(rb"[\x20-\x7e]+", line), "a command line is printable ASCII"
    rest = line.decode()
    verb, _, rest = rest.partition(" ")
    found = []
    while match := re.match(r'([a-z][a-z0-9_]*)=("(?:[^"\\]|\\.)*"|[^" ]*)(?: |$)', rest):
        name, value = match.groups()
        found.append((name, json.loads(value) if value.startswith('"') else value))
        rest = rest[match.end() :]
    sizes = [value for name, value in found if name == "bytes"]
    if not sizes:
        assert after == b"", "a second command follows"
        return verb, found, rest, None
    (size,) = sizes
    assert re.fullmatch("[0-9]+", size)
    assert len(after) == int(size) + 1, "the payload is not what was declared"
    assert after.endswith(b"\n")
    return verb, found, rest, after[:-1]


def server_sees(data: bytes) -> list[Any]:
    framer = Framer()
    return [*framer.feed(data), *framer.end()]


@given(prompt=st.one_of(texts, values), options=options, chat=st.booleans())
def test_a_generation_is_one_command(prompt: Any, options: dict[str, Any], chat: bool) -> None:
    encode = commands.chat if chat else commands.generate
    try:
        request = encode(prompt, "auto-1", options)
    except (TypeError, ValueError):
        return
    verb, found, rest, payload = take_one(request.data)
    assert verb == ("CHAT" if chat else "GEN")
    assert rest == ""
    assert payload == (prompt if isinstance(prompt, str) else ",".join(map(str, prompt))).encode()
    assert found[0] == ("id", options.get("id", "auto-1")) == ("id", request.id)
    sent = {name: value for name, value in found if name not in ("id", "bytes", "ids", "stop")}
    stops = options.get("stop", [])
    assert [value for name, value in found if name == "stop"] == (
        [stops] if isinstance(stops, str) else stops
    )
    for name, value in options.items():
        if isinstance(value, str) and name not in ("id", "stop"):
            assert sent[name] == value
        elif name not in ("id", "stop"):
            assert float(sent[name]) == float(value)
    assert len(server_sees(request.data)) == 1


@given(prompt=texts.filter(bool), system=texts, stops=st.lists(texts.filter(bool), max_size=4))
def test_the_server_reads_what_was_meant(prompt: str, system: str, stops: list[str]) -> None:
    (seen,) = server_sees(commands.chat(prompt, "a.1", {"system": system, "stop": stops, "max": 3}).data)
    assert isinstance(seen, Command)
    assert (seen.verb, seen.id, seen.text) == ("CHAT", "a.1", prompt)
    assert seen.options["system"] == system
    assert seen.options.get("stop", ()) == tuple(stops)
    assert seen.options["max"] == 3


@given(name=names, value=values)
def test_set_is_one_command(name: Any, value: Any) -> None:
    try:
        command = commands.set_option(name, value)
    except (TypeError, ValueError):
        return
    verb, found, rest, payload = take_one(command.data)
    assert (verb, found, payload) == ("SET", [], None)
    option, _, word = rest.partition(" ")
    assert option == name
    if word.startswith('"'):
        assert json.loads(word) == value
    else:
        assert word == value or float(word) == float(value)
    assert len(server_sees(command.data)) == 1


@pytest.mark.parametrize(
    "encode",
    [commands.cancel, commands.session, commands.stat, commands.help, lambda v: commands.stat("session", v)],
)
@given(word=st.one_of(values, st.from_regex(r"\A~?[A-Za-z0-9._-]{0,70}\n?\Z")))
def test_words_are_one_command(encode: Any, word: Any) -> None:
    try:
        command = encode(word)
    except (TypeError, ValueError):
        return
    _, found, rest, payload = take_one(command.data)
    assert (found, payload) == ([], None)
    assert len(rest.split(" ")) <= 2
    assert len(server_sees(command.data)) == 1


def test_subclasses_cannot_lie_about_themselves() -> None:
    plain = {"id": "i", "max": 3, "temp": 0.5, "system": "s", "stop": "t", "cache_route": 1, "route_j": 3}
    lying = {
        "id": LyingStr("i"),
        "max": LyingInt(3),
        "temp": LyingFloat(0.5),
        "system": LyingStr("s"),
        "stop": LyingStr("t"),
        "cache_route": LyingInt(1),
        "route_j": Level.LOW,
    }
    assert commands.generate(LyingStr("p"), "x", lying) == commands.generate("p", "x", plain)
    assert commands.generate([LyingInt(7)], "x", {}) == commands.generate([7], "x", {})
    assert commands.cancel(LyingStr("i")).data == b"CANCEL i\n"
    assert commands.set_option(LyingStr("temp"), LyingFloat(0.5)).data == b"SET temp 0.5\n"


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="seed must fit 64 bits"):
        commands.generate("x", "id", {"seed": 10**5000})


@pytest.mark.parametrize("number", ["1\nQUIT", "1", b"1", None, float("nan"), float("inf"), 2**64, 1j, [1]])
@pytest.mark.parametrize("name", ["max", "temp", "seed", "cache_route", "route_j", "route_lambda"])
def test_a_numeric_argument_is_a_number(name: str, number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        commands.generate("x", "id", {name: number})
