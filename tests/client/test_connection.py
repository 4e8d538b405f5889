"""The protocol without I/O, by transcripts of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_client import commands, errors
from coli_client.connection import Closed, Connection, Done, Event, Failed, Reply
from coli_client.results import Ack, Chunk, Info, Logprob, Session, StatLine, Version
from coli_client.transcript import Transcript

FIGURES = (
    b"finish=length tokens=32 prompt_tokens=5 seed=0 ttft_ms=41.0 tok_s=28.31 hit_pct=81.2 lookups=7440 "
    b"swap_pct=3.1 route_swaps=231 route_slots=7440 route_agree=96.9 route_kl=0.0410 "
    b"mode=max-rank scope=shared"
)


def running(*ids: str) -> Connection:
    """A connection on which these generations have been accepted."""
    connection = Connection()
    for id in ids:
        connection.send(commands.generate("x", id, {}))
        assert connection.receive(f"ACK {id} prompt_tokens=1 session=~1\n".encode()) == [Ack(id, 1, "~1")]
    return connection


def asked(command: commands.Command[object], *ids: str) -> Connection:
    connection = running(*ids)
    connection.send(command)
    return connection


def only_error(events: list[Event], kind: type[errors.ColiError]) -> errors.ColiError:
    """The reason of the one event, which must be `Closed`."""
    (event,) = events
    assert isinstance(event, Closed)
    assert type(event.error) is kind
    return event.error


def test_a_generation_from_ack_to_done() -> None:
    connection = running("7")
    transcript = Transcript("7")
    transcript.take(Ack("7", 5, "~1"))
    data = b'INFO 7 prefill=512/2048\nTOK 7 " there"\nTOK 7 "\\u00e9\\n"\nDONE 7 ' + FIGURES + b"\n"
    events = connection.receive(data)
    assert events[:3] == [
        Info("7", {"prefill": "512/2048"}),
        Chunk("7", " there"),
        Chunk("7", "é\n"),
    ]
    for event in events:
        transcript.take(event)
    result = transcript.result
    assert (result.text, result.session) == (" thereé\n", "~1")
    assert (result.finish, result.tokens, result.prompt_tokens, result.seed) == ("length", 32, 5, 0)
    assert (result.ttft_ms, result.tok_s, result.hit_pct, result.lookups) == (41.0, 28.31, 81.2, 7440)
    assert (result.swap_pct, result.route_swaps, result.route_slots) == (3.1, 231, 7440)
    assert (result.route_agree, result.route_kl, result.mode, result.scope) == (
        96.9,
        0.041,
        "max-rank",
        "shared",
    )
    assert not connection.owing


def test_unknown_words_are_ignored_and_kept() -> None:
    connection = Connection()
    connection.send(commands.generate("x", "1", {}))
    events = connection.receive(
        b"ACK 1 prompt_tokens=1 session=s place=4\n"
        b'TOK 1 "a" new=1\n'
        b"DONE 1 finish=stop tokens=1 prompt_tokens=1 seed=0 moon=full a.seed=7\n"
    )
    assert events[:2] == [Ack("1", 1, "s"), Chunk("1", "a")]
    done = events[2]
    assert isinstance(done, Done)
    assert done.result.fields["moon"] == "full"
    assert done.result.ttft_ms is None
    assert done.result.seed == 0


def test_info_is_ignored_wherever_it_stands() -> None:
    connection = Connection()
    connection.send(commands.ping())
    assert connection.receive(b"INFO\nINFO 9 queue=1\nINFO x\nPONG\n") == [Reply(None)]


def test_logprobs_are_the_second_word_of_a_chunk() -> None:
    connection = running("1")
    best = b'{"id":3,"text":"a","logprob":-0.5},{"id":9,"text":"\\n","logprob":-1}'
    line = b'TOK 1 "a b" [{"id":3,"text":"a","logprob":-0.5,"top":[%b]},{"id":4,"text":" b","logprob":-2}]\n'
    first = Logprob(3, "a", -0.5, (Logprob(3, "a", -0.5), Logprob(9, "\n", -1.0)))
    assert connection.receive(line % best) == [Chunk("1", "a b", (first, Logprob(4, " b", -2.0)))]


def test_generations_interleave_with_each_other_and_with_commands() -> None:
    connection = asked(commands.stat(), "a", "b")
    data = (
        b'TOK b "1"\nTOK a "2"\nSTAT x 1\nSTAT mode stock\nEND\nTOK b "3"\n'
        b"DONE a finish=stop tokens=1 prompt_tokens=1\nERR MODEL id=b disk is gone\n"
    )
    events = connection.receive(data)
    assert events[:4] == [
        Chunk("b", "1"),
        Chunk("a", "2"),
        Reply({"x": "1", "mode": "stock"}),
        Chunk("b", "3"),
    ]
    assert isinstance(events[4], Done)
    failed = events[5]
    assert isinstance(failed, Failed)
    assert failed.id == "b"
    assert isinstance(failed.error, errors.RequestFailed)
    assert not connection.owing


def test_help_may_look_like_a_generation() -> None:
    connection = asked(commands.help("gen"), "7")
    events = connection.receive(b'TOK 7 "x"\nGEN [options] <prompt>\n  TOK 7 "y"\nERR X\nTOK 7 "z"\nEND\n')
    assert events == [Chunk("7", "x"), Reply('GEN [options] <prompt>\n  TOK 7 "y"\nERR X\nTOK 7 "z"')]


@pytest.mark.parametrize(
    ("command", "data", "value"),
    [
        (commands.ping(), b"PONG\n", None),
        (commands.ping(), b"PONG\r\n", None),
        (commands.version(), b"VERSION 0.1.0 protocol=1\n", Version("0.1.0", 1)),
        (commands.version(), b"VERSION 0.1.0 protocol=1 git=abc\n", Version("0.1.0", 1)),
        (commands.help(), b"END\n", ""),
        (commands.help(), b"a\n\nb\nEND\n", "a\n\nb"),
        (commands.stat(), b"END\n", {}),
        (commands.stat(), b"STAT a 1\nSTAT b \nEND\n", {"a": "1", "b": ""}),
        (commands.stat_reset(), b"RESET\n", None),
        (commands.session("s"), b"OK session=s new=1\n", Session("s", True)),
        (commands.session("s"), b"OK session=s new=0\n", Session("s", False)),
        (commands.set_option("temp", 1), b"OK\n", None),
        (commands.cancel("x"), b"OK\n", None),
        (commands.reset(), b"OK waited=1\n", None),
        (commands.stat_line(), b"STAT 32 28.31 81.2 1.95 5 1\n", StatLine(32, 28.31, 81.2, 1.95, 5, True)),
        (
            commands.stat_line(),
            b"STAT 32 28.31 81.2 1.95 5 0 swap_pct=3.1 route_swaps=231 route_slots=7440 route_agree=96.9 "
            b"route_kl=0.041 more=1\n",
            StatLine(32, 28.31, 81.2, 1.95, 5, False, 3.1, 231, 7440, 96.9, 0.041),
        ),
    ],
)
def test_replies(command: commands.Command[object], data: bytes, value: object) -> None:
    connection = asked(command)
    assert connection.receive(data) == [Reply(value)]
    assert connection.idle


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("BUSY", errors.Busy),
        ("DRAINING", errors.Draining),
        ("BAD_REQUEST", errors.BadRequest),
        ("UNKNOWN_VERB", errors.BadRequest),
        ("BAD_UTF8", errors.BadRequest),
        ("LINE_TOO_LONG", errors.BadRequest),
        ("BAD_OPTION", errors.BadOption),
        ("DUPLICATE_ID", errors.DuplicateId),
        ("NOT_FOUND", errors.NotFound),
        ("PAYLOAD_TOO_LARGE", errors.PayloadTooLarge),
        ("CONTEXT_EXCEEDED", errors.ContextExceeded),
        ("AUTH", errors.AccessDenied),
        ("FORBIDDEN", errors.AccessDenied),
        ("MODEL", errors.RequestFailed),
        ("INTERNAL", errors.RequestFailed),
        ("FROM_THE_FUTURE", errors.ServerError),
    ],
)
def test_the_code_picks_the_class(code: str, kind: type[errors.ServerError]) -> None:
    connection = asked(commands.ping())
    (event,) = connection.receive(f"ERR {code} what happened\n".encode())
    assert isinstance(event, Failed)
    assert type(event.error) is kind
    assert (event.error.code, event.error.message) == (code, "what happened")
    assert str(event.error) == f"{code}: what happened"
    assert connection.idle


def test_every_code_of_the_server_has_a_class_of_its_own() -> None:
    from coli_server.protocol.errors import CODES

    for code in CODES:
        assert type(errors.server_error(code, "")) is not errors.ServerError, code


@pytest.mark.parametrize("code", ["TIMEOUT", "SLOW_READER", "TOO_MANY_CLIENTS", "HTTP"])
def test_an_error_that_closes_is_the_reason_for_all_that_runs(code: str) -> None:
    connection = asked(commands.ping(), "a")
    (event,) = connection.receive(f"ERR {code} bye\nPONG\n".encode())
    assert isinstance(event, Closed)
    assert isinstance(event.error, errors.ServerError)
    assert event.error.code == code
    assert not connection.owing


def test_an_error_that_nothing_asked_for_closes() -> None:
    (event,) = Connection().receive(b"ERR DRAINING going down\n")
    assert isinstance(event, Closed)
    assert isinstance(event.error, errors.Draining)


def test_errors_carry_their_figures() -> None:
    def refused(words: str) -> errors.ServerError:
        connection = Connection()
        connection.send(commands.generate("x", "1", {}))
        (event,) = connection.receive(f"ERR {words}\n".encode())
        assert isinstance(event, Failed)
        assert event.id == "1"
        return event.error

    busy = refused("BUSY id=1 retry_ms=250 the queue is full")
    assert isinstance(busy, errors.Busy)
    assert (busy.retry_ms, busy.message, busy.id) == (250, "the queue is full", "1")
    exceeded = refused("CONTEXT_EXCEEDED id=1 prompt_tokens=9000 capacity=8192 too long")
    assert isinstance(exceeded, errors.ContextExceeded)
    assert (exceeded.prompt_tokens, exceeded.capacity) == (9000, 8192)
    bare = refused("BUSY retry_ms=-1")
    assert isinstance(bare, errors.Busy)
    assert (bare.retry_ms, bare.message) == (None, "")


def test_an_error_without_an_id_belongs_to_the_waiting_command() -> None:
    connection = running("a")
    connection.send(commands.generate("x", "b", {}))
    (event,) = connection.receive(b"ERR BAD_OPTION max=0 is refused\n")
    assert isinstance(event, Failed)
    assert event.id == "b"
    assert connection.owes("a")
    assert not connection.owes("b")


def test_a_cancellation_that_finds_nothing_does_not_end_the_generation() -> None:
    connection = asked(commands.cancel("a"), "a")
    (event,) = connection.receive(b"ERR NOT_FOUND id=a no such request\n")
    assert isinstance(event, Failed)
    assert event.id is None
    assert connection.owes("a")


@pytest.mark.parametrize(
    "line",
    [
        b"PONG",
        b"OK",
        b"",
        b"hello",
        b"ACK 1 prompt_tokens=1 session=x",
        b'TOK 2 "x"',
        b"TOK 1 x",
        b"TOK 1 3",
        b"TOK 1",
        b'TOK 1 "x',
        b'TOK 1 "\t"',
        b'TOK 1 "x" [',
        b'TOK 1 "x" ' + b"[" * 100_000,
        b'TOK 1 "x" [' + b"9" * 5000 + b"]",
        b"DONE 2 finish=stop tokens=1 prompt_tokens=1",
        b'TOK 1 "x" [3]',
        b'TOK 1 "x" [{}]',
        b'TOK 1 "x" [{"id":"3","text":"a","logprob":-1}]',
        b'TOK 1 "x" [{"id":3,"text":"a","logprob":null}]',
        b'TOK 1 "x" [{"id":3,"text":"a","logprob":-1,"top":3}]',
        b"DONE 1",
        b"DONE 1 finish=stop tokens=1",
        b"DONE 1 finish=stop tokens=-1 prompt_tokens=1",
        b"DONE 1 finish=stop tokens=1_0 prompt_tokens=1",
        b"DONE 1 finish=stop tokens=1 prompt_tokens=" + b"1" * 5000,
        b"DONE 1 finish=stop tokens=1 prompt_tokens=1 tok_s=fast",
        b"DONE 1 finish=stop tokens=1 prompt_tokens=1 tok_s=nan",
        b"ERR",
        b"ERR ",
        b'TOK 1 "\xff"',
    ],
)
def test_a_line_that_should_not_have_come_closes(line: bytes) -> None:
    connection = running("1")
    error = only_error(connection.receive(line + b'\nTOK 1 "late"\n'), errors.ProtocolViolation)
    assert len(str(error)) < 500
    assert connection.receive(b'TOK 1 "later"\n') == []
    with pytest.raises(errors.ConnectionLost):
        connection.send(commands.ping())


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (commands.ping(), b"PONGO"),
        (commands.version(), b"VERSION"),
        (commands.version(), b"VERSION 1.0"),
        (commands.session("s"), b"OK"),
        (commands.stat(), b"STATS a 1\nEND"),
        (commands.stat(), b"STAT \nEND"),
        (commands.stat_line(), b"STAT 1 2 3"),
        (commands.stat_line(), b"STAT a 2 3 4 5 6"),
        (commands.reset(), b"RESET"),
    ],
)
def test_an_answer_to_another_question_closes(command: commands.Command[object], line: bytes) -> None:
    only_error(asked(command).receive(line + b"\n"), errors.ProtocolViolation)


def test_a_line_is_bounded_whether_it_ends_or_not() -> None:
    for data in (b"x" * 101, b"x" * 101 + b"\n"):
        connection = Connection(max_line=100)
        connection.send(commands.ping())
        error = only_error(connection.receive(data), errors.ProtocolViolation)
        assert "over 100 bytes" in str(error)


def test_a_reply_of_many_lines_is_bounded() -> None:
    connection = Connection(max_reply=1000)
    for _ in range(3):  # each reply has the whole bound for itself
        connection.send(commands.stat())
        assert len(connection.receive(b"STAT a 1\n" * 100 + b"END\n")) == 1
    connection.send(commands.help())
    only_error(connection.receive(b"STAT a 1\n" * 200), errors.ProtocolViolation)


@pytest.mark.parametrize("half", [b"", b'TOK 1 "x', b"DONE 1 finish=stop tokens=1 prompt_tokens=1"])
def test_the_server_closes_in_the_middle(half: bytes) -> None:
    connection = running("1")
    assert connection.receive(half) == []
    error = only_error(connection.end(), errors.ConnectionLost)
    assert "in the middle" in str(error)
    assert connection.end() == []


def test_one_command_waits_at_a_time() -> None:
    connection = asked(commands.ping())
    with pytest.raises(RuntimeError, match="waiting"):
        connection.send(commands.ping())


def test_an_id_runs_once_at_a_time() -> None:
    connection = running("a")
    with pytest.raises(ValueError, match="id='a' is running"):
        connection.send(commands.chat("x", "a", {}))
    connection.receive(b"DONE a finish=stop tokens=1 prompt_tokens=1\n")
    assert connection.send(commands.chat("x", "a", {})).startswith(b"CHAT id=a ")


LINES = [
    b'TOK 1 "x"',
    b'TOK 2 "y"',
    b"TOK 1",
    b"INFO 1 a=b",
    b"DONE 1 finish=stop tokens=1 prompt_tokens=1",
    b"DONE 2 finish=stop tokens=x prompt_tokens=1",
    b"ERR",
    b"ERR BUSY",
    b"ERR NOT_FOUND id=1 x",
    b"ERR MODEL id=2 x",
    b"ERR TIMEOUT x",
    b"STAT a 1",
    b"END",
    b"OK",
    b"\xff",
    b"",
    b"x" * 70,
]
stream = st.lists(st.sampled_from(LINES) | st.binary(max_size=80), max_size=12).map(b"\n".join)


@given(
    data=stream | st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    command=st.sampled_from([None, commands.ping(), commands.stat(), commands.help(), commands.cancel("1")]),
)
def test_any_bytes_give_the_same_events_whole_or_in_pieces(
    data: bytes, cuts: list[int], command: commands.Command[object] | None
) -> None:
    def fed(pieces: list[bytes]) -> list[str]:
        connection = running("1", "2")
        connection._max_line = 64
        if command is not None:
            connection.send(command)
        events = [event for piece in pieces for event in connection.receive(piece)]
        events += connection.end()
        assert isinstance(events[-1], Closed)
        assert not any(isinstance(event, Closed) for event in events[:-1])
        assert not connection.owing
        return [repr(event) for event in events]

    ends = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[start:end] for start, end in itertools.pairwise(ends)]
    assert fed([data]) == fed(pieces) == fed([data[at : at + 1] for at in range(len(data))])


def test_byte_by_byte_input_stays_linear() -> None:
    """Each byte is copied a bounded number of times: the partial line is one buffer that only grows."""
    connection = running("1")
    line = b'TOK 1 "' + b"x" * 50_000 + b'"\n'
    buffers = set()
    for at in range(len(line) - 1):
        assert connection.receive(line[at : at + 1]) == []
        buffers.add(id(connection._partial))
    assert len(buffers) == 1
    assert connection.receive(b"\n") == [Chunk("1", "x" * 50_000)]


def test_a_transcript_has_no_result_before_the_end() -> None:
    transcript = Transcript("7")
    with pytest.raises(RuntimeError, match="generation 7 has not ended"):
        _ = transcript.result


def test_figures_as_numbers() -> None:
    connection = asked(commands.stat())
    (reply,) = connection.receive(b"STAT a 1\nSTAT b 2.5\nSTAT mode stock\nEND\n")
    assert isinstance(reply, Reply)
    figures = reply.value
    assert (figures.number("a"), figures.number("b")) == (1, 2.5)
    assert isinstance(figures.number("a"), int)
    with pytest.raises(ValueError, match="stock"):
        figures.number("mode")
    with pytest.raises(KeyError):
        figures.number("c")


def test_errors_survive_pickling() -> None:
    import pickle

    error = errors.server_error("BUSY", "full", "1", {"retry_ms": "5"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.retry_ms, again.id) == (errors.Busy, str(error), 5, "1")
