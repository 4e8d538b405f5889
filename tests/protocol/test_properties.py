"""What holds for any bytes at all, and for anything that a careful client may send."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from coli_server.protocol import OPTIONS, VERBS, Command, Event, Framer, Limits, ProtocolError, replies
from coli_server.ranges import Choices, NumberRange, Value

PING = Command("PING")

# Small limits, so that short inputs reach every branch.
LIMITS = Limits(line=96, payload=24)

FRAGMENTS = [
    b"\n",
    b"\r\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b"PING",
    b"GEN ",
    b"CHAT ",
    b"SET ",
    b"STAT ",
    b"QUIT",
    b"bytes=",
    b" bytes=",
    b" bytes=3\nabc\n",
    b" bytes=3\n\xff\n\n\n",
    b" bytes=30\n",
    b"bytes=0\n\n",
    b"bytes=99999999\n",
    b' stop="',
    b' stop="\\',
    b'"',
    b"\\",
    b"\\ud800",
    b" -- ",
    b"--",
    b" id=7",
    b" ids=1",
    b" 1,2",
    b"max=1 ",
    b"x=",
    b"A" * 50,
    b"9" * 50,
    b"\xc3",
    b"\xa9",
    b"\xed\xa0\x80",
    b"GET / HTTP/1.1",
    b"\x16\x03",
]
STREAMS = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=6), max_size=24).map(b"".join)


def fed(data: bytes, cuts: list[int]) -> tuple[list[Event], bool, bytes]:
    """Everything that can be seen of a framer that gets `data` cut at `cuts` and then the end of input."""
    framer = Framer(LIMITS)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    events: list[Event] = []
    for start, stop in itertools.pairwise(edges):
        events += framer.feed(data[start:stop])
    closed = framer.closed
    return events + framer.end(), closed, framer.newline


@settings(max_examples=400)
@given(STREAMS, st.lists(st.integers(0, 1 << 16), max_size=8))
def test_any_split_of_any_bytes_gives_the_same_events(data: bytes, cuts: list[int]) -> None:
    whole = fed(data, [])
    assert fed(data, cuts) == whole
    assert fed(data, list(range(len(data)))) == whole


@settings(max_examples=400)
@given(STREAMS)
def test_only_commands_and_protocol_errors_come_out(data: bytes) -> None:
    framer = Framer(LIMITS)
    events = framer.feed(data)
    for event in events:
        assert isinstance(event, Command | ProtocolError)
        if isinstance(event, Command):
            assert event.verb in VERBS
            assert 0 < event.size <= len(data)
            # All texts have a UTF-8 form: a tokenizer may rely on it.
            (event.text + "".join(map(str, event.options.values()))).encode()
        else:
            line = replies.error(event.code, event.message, id=event.id)
            assert line.decode()[:-1].isprintable()
            assert b"refused: " not in line
    assert framer.closed == any(isinstance(event, ProtocolError) and event.close for event in events)
    if framer.closed:
        assert isinstance(events[-1], ProtocolError)
        assert events[-1].close
        assert framer.feed(b"PING\n") == []


@settings(max_examples=400)
@given(STREAMS, st.data())
def test_after_any_line_the_next_ping_is_answered_or_the_connection_is_closed(
    junk: bytes, data: st.DataObject
) -> None:
    framer = Framer(LIMITS)
    line = junk.replace(b"\n", b"")
    events = framer.feed(line + b"\n")
    if framer.pending:
        assert events == []
        assert framer.pending.missing is not None
        size = framer.pending.missing - 1
        # A payload that would be commands if it were read as lines.
        payload = data.draw(st.binary(max_size=8)) + b"QUIT\n" * (size // 5 + 1)
        events = framer.feed(payload[:size] + b"\n")
    assert len(events) == bool(line.removesuffix(b"\r").strip(b" \t"))
    assert framer.feed(b"PING\n") == ([] if framer.closed else [PING])


def encode(verb: str, options: Mapping[str, str], payload: str | None) -> bytes:
    """A careful client's encoder, written from the documentation alone: JSON strings and a length."""
    words = [verb, *(f"{name}={json.dumps(value)}" for name, value in options.items())]
    if payload is None:
        return " ".join(words).encode() + b"\n"
    body = payload.encode()
    return " ".join([*words, f"bytes={len(body)}"]).encode() + b"\n" + body + b"\n"


NASTY = ["\n", "\r", "\0", "QUIT", '"', "\\", " bytes=9", " ", "é"]
TEXTS = st.text() | st.lists(st.sampled_from(NASTY)).map("".join)
VERB_WORDS = ["GEN", "CHAT", "SET", "PING", "STAT", "SESSION", "NONE"]
NAMES = st.sampled_from([name for name in OPTIONS if name != "bytes"])


@settings(max_examples=300)
@given(st.sampled_from(VERB_WORDS), st.dictionaries(NAMES, TEXTS), TEXTS)
def test_no_value_smuggles_a_second_command(verb: str, options: dict[str, str], text: str) -> None:
    framer = Framer()
    events = framer.feed(encode(verb, options, text) + b"PING\n")
    assert len(events) == 2
    assert events[1] == PING


@settings(max_examples=300)
@given(TEXTS.filter(bool), st.sampled_from(["GEN", "CHAT"]))
def test_every_text_comes_through_json_and_through_a_payload(text: str, verb: str) -> None:
    for line in (
        encode(verb, {}, text),
        f"{verb} {json.dumps(text)}\n".encode(),
        f"{verb} -- {json.dumps(text, ensure_ascii=False)}\n".encode(),
    ):
        assert Framer().feed(line) == [Command(verb, text=text)]


def spelled(name: str) -> st.SearchStrategy[tuple[str, Value]]:
    """A spelling and the value that it means, for a numeric option or a choice."""
    accepts = OPTIONS[name].accepts
    if isinstance(accepts, Choices):
        return st.sampled_from(accepts.values)
    assert isinstance(accepts, NumberRange)
    numbers: st.SearchStrategy[int | float]
    low, high = accepts.low, accepts.high
    if accepts.integer:
        numbers = st.integers(int(low), int(high))
    else:
        numbers = st.floats(low, high, exclude_min=accepts.low_open, exclude_max=accepts.high_open).map(abs)
    return numbers.map(lambda number: (repr(number), number))


RANGED = [name for name, option in OPTIONS.items() if option.accepts and name != "ids"]


SPELLED = st.sets(st.sampled_from(RANGED)).flatmap(
    lambda names: st.fixed_dictionaries({name: spelled(name) for name in names})
)


@settings(max_examples=200)
@given(SPELLED)
def test_every_value_in_range_comes_through_quoted_and_plain(values: dict[str, tuple[str, Value]]) -> None:
    expected = Command("GEN", options={name: value for name, (_, value) in values.items()}, text="x")
    plain = " ".join(["GEN", *(f"{name}={word}" for name, (word, _) in values.items()), "x\n"]).encode()
    assert Framer().feed(plain) == [expected]
    assert Framer().feed(encode("GEN", {name: word for name, (word, _) in values.items()}, "x")) == [expected]
