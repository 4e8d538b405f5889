"""The framer keeps its place: one scenario a test, bytes in, events out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coli_server.errors import ConfigurationError
from coli_server.protocol import MAX_LINE, MAX_PAYLOAD, Command, Event, Framer, Limits, Pending, ProtocolError

PING = Command("PING")


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def events_of(data: bytes, limits: Limits | None = None) -> list[Event]:
    """The events of a whole connection; it is fed at once and again byte by byte, which must agree."""
    whole, single = Framer(limits), Framer(limits)
    events = whole.feed(data) + whole.end()
    if len(data) < 1000:
        assert [event for piece in pieces(data, 1) for event in single.feed(piece)] + single.end() == events
    return events


def summary(data: bytes, limits: Limits | None = None) -> list[str]:
    """Verbs of commands, codes of errors (with * where the connection closes)."""
    return [
        event.verb if isinstance(event, Command) else event.code + "*" * event.close
        for event in events_of(data, limits)
    ]


class TestLines:
    def test_a_line_is_a_command_at_its_lf_and_not_before(self) -> None:
        framer = Framer()
        assert framer.feed(b"PING") == []
        assert framer.feed(b"\n") == [PING]

    def test_many_lines_in_one_piece(self) -> None:
        assert events_of(b"PING\nping\nPiNg\n") == [PING] * 3

    def test_one_cr_before_the_lf_is_dropped(self) -> None:
        assert events_of(b"PING\r\nGEN a\r\n") == [PING, Command("GEN", text="a")]

    def test_only_one_cr_is_dropped_and_a_bare_cr_ends_nothing(self) -> None:
        assert events_of(b"GEN a\r\r\nGEN b\rPING\n") == [
            Command("GEN", text="a\r"),
            Command("GEN", text="b\rPING"),
        ]

    @pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t \n", b" \r\n"])
    def test_blank_lines_are_ignored(self, blank: bytes) -> None:
        assert events_of(blank * 3 + b"PING\n" + blank) == [PING]

    def test_other_line_ends_of_unicode_end_no_line(self) -> None:
        text = "a\u2028b\u2029c\x85d\x0be\x0cf"
        assert events_of(f"GEN {text}\n".encode()) == [Command("GEN", text=text)]

    @pytest.mark.parametrize("tail", [b"PING", b"GEN x", b"GEN bytes=3", b"\x16", b"\xff"])
    def test_an_unterminated_last_line_is_refused_and_not_executed(self, tail: bytes) -> None:
        assert summary(b"PING\n" + tail) == ["PING", "BAD_REQUEST"]

    @pytest.mark.parametrize("tail", [b"", b" ", b"\r", b"\t \r"])
    def test_blanks_at_the_end_of_input_are_no_command(self, tail: bytes) -> None:
        assert summary(b"PING\n" + tail) == ["PING"]

    def test_after_the_end_nothing_is_read(self) -> None:
        framer = Framer()
        framer.end()
        assert framer.closed
        assert framer.feed(b"PING\n") == []
        assert framer.end() == []


class TestLongLines:
    def test_the_limit_is_exact(self) -> None:
        fits = b"GEN " + b"A" * (MAX_LINE - 4)
        assert summary(fits + b"\n") == ["GEN"]
        assert summary(fits + b"A\n") == ["LINE_TOO_LONG"]

    def test_the_rest_of_an_over_long_line_is_never_a_command(self) -> None:
        # A reader that hands over what follows its limit would run the second half.
        for size in range(MAX_LINE - 6, MAX_LINE + 4):
            line = b"A" * size + b"QUIT\n"
            assert summary(line + b"PING\n") in (["LINE_TOO_LONG", "PING"], ["UNKNOWN_VERB", "PING"])

    def test_it_is_skipped_to_its_lf_in_pieces_of_any_size(self) -> None:
        data = b"A" * 66_000 + b" QUIT\nPING\n"
        for size in (1, 7, 4096, MAX_LINE, MAX_LINE + 1, MAX_LINE + 2):
            framer = Framer()
            events = [event for piece in pieces(data, size) for event in framer.feed(piece)]
            assert [type(event) for event in events] == [ProtocolError, Command], size

    def test_it_is_refused_at_once_when_its_text_has_begun(self) -> None:
        framer = Framer()
        (error,) = framer.feed(b"GEN id=7 " + b"x " * MAX_LINE)
        assert isinstance(error, ProtocolError)
        assert (error.code, error.close, error.id) == ("LINE_TOO_LONG", False, "7")
        assert framer.feed(b"bytes=5 still skipped\n") == []
        assert framer.feed(b"PING\n") == [PING]

    def test_memory_is_bounded_while_skipping(self) -> None:
        framer = Framer()
        for _ in range(100):
            framer.feed(b"A" * 65_536)
        assert len(framer._buffer) == 0
        assert framer.pending == Pending("line", 100 * 65_536)

    @pytest.mark.parametrize(
        "line",
        [
            b"GEN bytes=5 %s",
            b"bytes=5 %s",
            b'GEN system="%s" bytes=5',
            b"GEN stop=%s bytes=5 x",
            b"%s bytes=5",
            b"%s\tbytes=5",
            b'GEN stop="%s bytes=5',
            b"GEN bytes=%s",
        ],
    )
    def test_an_over_long_line_that_may_declare_a_payload_closes(self, line: bytes) -> None:
        # Its payload could not be told from commands.
        data = line % (b"9" * (MAX_LINE + 50)) + b"\nQUIT\nPING\n"
        assert summary(data) == ["BAD_REQUEST*"]
        for size in (1, 1000, MAX_LINE + 1):
            framer = Framer()
            assert len([event for piece in pieces(data, size) for event in framer.feed(piece)]) == 1, size

    @pytest.mark.parametrize("text", [b"A ", b"-- ", b'"', b"aa bytes=5 "])
    def test_an_over_long_text_that_speaks_of_bytes_does_not_close(self, text: bytes) -> None:
        data = b"GEN " + text + b"x" * MAX_LINE + b" bytes=5\nPING\n"
        assert summary(data) == ["LINE_TOO_LONG", "PING"]

    def test_an_over_long_last_line_is_one_error(self) -> None:
        assert summary(b"A" * 70_000) == ["LINE_TOO_LONG"]
        assert summary(b"GEN B " + b"A" * 70_000) == ["LINE_TOO_LONG"]

    def test_the_limit_is_a_setting(self) -> None:
        assert summary(b"GEN " + b"A" * 61 + b"\nPING\n", Limits(line=64)) == ["LINE_TOO_LONG", "PING"]
        with pytest.raises(ConfigurationError, match="line limit"):
            Limits(line=63)


class TestPayloads:
    def test_it_is_the_text_exactly(self) -> None:
        text = ' "a"\r\nQUIT\n\0é -- temp=3 '
        assert events_of(f"GEN bytes={len(text.encode())}\n{text}\nPING\n".encode()) == [
            Command("GEN", text=text),
            PING,
        ]

    def test_it_may_follow_any_option_and_leading_zeros(self) -> None:
        assert events_of(b"GEN temp=0 bytes=0005 max=3\nhello\n") == [
            Command("GEN", options={"temp": 0.0, "max": 3}, text="hello")
        ]

    @pytest.mark.parametrize(
        ("header", "code"),
        [
            (b"FOO bytes=5", "UNKNOWN_VERB"),
            (b"\xff bytes=5", "BAD_UTF8"),
            (b"bytes=5", "BAD_REQUEST"),
            (b"PING bytes=5", "BAD_REQUEST"),
            (b"STAT bytes=5 session", "BAD_REQUEST"),
            (b"QUIT bytes=5", "BAD_REQUEST"),
            (b"GEN bytes=5 text", "BAD_REQUEST"),
            (b"GEN temp=9999 bytes=5", "BAD_OPTION"),
            (b"GEN foo=1 bytes=5", "BAD_OPTION"),
            (b"GEN temp=1 temp=1 bytes=5", "BAD_OPTION"),
            (b'GEN stop="\\q" bytes=5', "BAD_OPTION"),
            (b"GEN stop=\xff bytes=5", "BAD_UTF8"),
            (b"GEN stop=a\0b bytes=5", "BAD_REQUEST"),
            (b"GEN bytes=5 \xff", "BAD_UTF8"),
            (b"SET bytes=5", "BAD_REQUEST"),
            (b"SET bytes=5 nothing", "BAD_OPTION"),
            (b"JUDGE bytes=5", "UNKNOWN_VERB"),
            (b"SCORE bytes=5", "BAD_REQUEST"),
        ],
    )
    def test_the_payload_of_a_refused_command_is_never_read_as_commands(
        self, header: bytes, code: str
    ) -> None:
        assert summary(header + b"\nQUIT\n\nPING\n") == [code, "PING"]
        assert summary(header + b"\nQUITx\nPING\n") == [code, "PING"]

    @pytest.mark.parametrize(
        "word",
        [
            b"",
            b"-1",
            b"+5",
            b"1_0",
            b"5.0",
            b"5e0",
            b"0x5",
            b'"5"',
            b"5\r",
            b"5,",
            "٥".encode(),
            b"\xff",
            b"5\0",
        ],
    )
    def test_a_malformed_length_closes(self, word: bytes) -> None:
        assert summary(b"GEN id=7 bytes=" + word + b" max=1\nQUIT\nPING\n") == ["BAD_REQUEST*"]

    def test_a_repeated_length_closes(self) -> None:
        assert summary(b"GEN bytes=4 bytes=4\nQUIT\nPING\n") == ["BAD_REQUEST*"]

    @pytest.mark.parametrize("line", [b'GEN stop="x bytes=4', b'GEN stop="x"y bytes=4', b'GEN bytes="4'])
    def test_a_length_after_a_string_without_end_closes(self, line: bytes) -> None:
        # Whether it is an option or part of the string cannot be known.
        assert summary(line + b"\nQUIT\nPING\n") == ["BAD_REQUEST*"]

    def test_a_string_without_end_and_no_length_after_it_does_not_close(self) -> None:
        assert summary(b'GEN stop="x bytes\nPING\n') == ["BAD_OPTION", "PING"]

    @pytest.mark.parametrize(
        "line", [b"GEN a bytes=4", b"GEN -- bytes=4", b"GEN BYTES=4", b'GEN "a" bytes=4']
    )
    def test_after_the_text_has_begun_a_length_is_text(self, line: bytes) -> None:
        assert summary(line + b"\nPING\n") == ["GEN", "PING"]

    @pytest.mark.parametrize("end", [b"QUIT\n", b"\r\nPING\n", b" \n", b"\0"])
    def test_a_missing_lf_after_the_payload_closes(self, end: bytes) -> None:
        assert summary(b"GEN id=7 bytes=5\nhello" + end) == ["BAD_REQUEST*"]

    def test_an_empty_payload_is_an_empty_text(self) -> None:
        assert summary(b"GEN bytes=0\n\nPING\n") == ["BAD_REQUEST", "PING"]

    @pytest.mark.parametrize("got", [b"", b"hell", b"hello"])
    def test_end_of_input_inside_a_payload_is_refused(self, got: bytes) -> None:
        (error,) = events_of(b"GEN id=7 bytes=5\n" + got)
        assert isinstance(error, ProtocolError)
        assert (error.code, error.close, error.id) == ("BAD_REQUEST", False, "7")

    def test_a_payload_over_the_limit_is_skipped(self) -> None:
        limits = Limits(payload=10)
        assert summary(b"GEN bytes=10\n0123456789\nPING\n", limits) == ["GEN", "PING"]
        assert summary(b"GEN bytes=11\nQUIT\nPING\nQ\nPING\n", limits) == ["PAYLOAD_TOO_LARGE", "PING"]
        assert summary(b"GEN bytes=11\nQUIT\nPING\nQxPING\n", limits) == ["BAD_REQUEST*"]
        assert summary(b"GEN bytes=11\nQUIT", limits) == ["BAD_REQUEST"]

    def test_memory_is_bounded_while_skipping_a_payload(self) -> None:
        framer = Framer()
        assert framer.feed(b"GEN id=x bytes=%d\n" % MAX_PAYLOAD) == []
        for _ in range(64):
            assert framer.feed(b"Q" * (1 << 20)) == []
            assert len(framer._buffer) == 0
        (error, ping) = framer.feed(b"\nPING\n")
        assert isinstance(error, ProtocolError)
        assert (error.code, error.close, error.id, ping) == ("PAYLOAD_TOO_LARGE", False, "x", PING)

    @pytest.mark.parametrize("size", [str(MAX_PAYLOAD + 1), "9" * 40, "9" * 20_000, "0" * 100 + "99999999"])
    def test_beyond_the_hard_limit_it_closes_at_once(self, size: str) -> None:
        assert summary(f"GEN bytes={size}\nQUIT\n".encode()) == ["PAYLOAD_TOO_LARGE*"]

    def test_the_soft_limit_cannot_be_set_over_the_hard_one(self) -> None:
        assert Limits(payload=MAX_PAYLOAD).payload == MAX_PAYLOAD
        for payload in (-1, MAX_PAYLOAD + 1):
            with pytest.raises(ConfigurationError, match="payload limit"):
                Limits(payload=payload)

    def test_a_payload_that_is_not_utf8_is_refused_and_consumed(self) -> None:
        assert summary(b"GEN bytes=2\n\xc3(\nPING\n") == ["BAD_UTF8", "PING"]
        assert summary(b"GEN bytes=3\n\xed\xa0\x80\nPING\n") == ["BAD_UTF8", "PING"]  # half a surrogate pair


class TestOtherProtocols:
    @pytest.mark.parametrize(
        "start",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\nQUIT\n",
            b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nQUIT\n",
            b"POST http://x/ HTTP/1.0\n\nQUIT\n",
            b"PROPFIND /dav HTTP/1.1\r\nQUIT\r\n",
            b"GEN / HTTP/1.1\r\nQUIT\r\n",
            b"CONNECT host:443 HTTP/1.1\r\nQUIT\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /\r\nQUIT\r\n",
            b"\r\nGET / HTTP/1.1\r\nQUIT\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nQUIT\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\nQUIT\n",
        ],
    )
    def test_a_first_line_of_http_or_tls_closes_and_nothing_else_is_read(self, start: bytes) -> None:
        assert summary(start) == ["HTTP*"]

    def test_a_tls_hello_is_noticed_before_any_lf(self) -> None:
        framer = Framer()
        assert framer.feed(b"\x16") == []
        (error,) = framer.feed(b"\x03")
        assert isinstance(error, ProtocolError)
        assert error.code == "HTTP"
        assert framer.closed

    def test_later_lines_are_not_looked_at(self) -> None:
        assert summary(b"PING\nGET / HTTP/1.1\n\x16\x03\n") == ["PING", "UNKNOWN_VERB", "UNKNOWN_VERB"]

    def test_a_prompt_about_http_is_a_prompt(self) -> None:
        assert summary(b"GEN what is GET / HTTP/1.1\n") == ["GEN"]
        assert summary(b"get key\n") == ["UNKNOWN_VERB"]


class TestState:
    def test_pending_tells_what_is_half_there(self) -> None:
        framer = Framer()
        assert framer.pending is None
        framer.feed(b"GEN by")
        assert framer.pending == Pending("line", 6)
        framer.feed(b"tes=5\n")
        assert framer.pending == Pending("payload", 0, 6)
        framer.feed(b"hello")
        assert framer.pending == Pending("payload", 5, 1)
        framer.feed(b"\n")
        assert framer.pending is None

    def test_pending_counts_what_was_dropped(self) -> None:
        framer = Framer(Limits(payload=2))
        framer.feed(b"GEN bytes=9\n1234567")
        assert framer.pending == Pending("payload", 7, 3)

    def test_nothing_is_pending_after_a_close(self) -> None:
        framer = Framer()
        framer.feed(b"GEN bytes=x\nPI")
        assert framer.closed
        assert framer.pending is None
        assert framer.end() == []

    @pytest.mark.parametrize(
        ("data", "newline"),
        [
            (b"", b"\n"),
            (b"stats\r\n", b"\r\n"),
            (b"\nstats\r\nPING\n", b"\r\n"),
            (b"PING\nPING\r\n", b"\n"),
            (b"FOO\r\n", b"\r\n"),
        ],
    )
    def test_the_first_command_decides_the_line_end_of_replies(self, data: bytes, newline: bytes) -> None:
        framer = Framer()
        framer.feed(data)
        assert framer.newline == newline

    def test_errors_hold_no_traceback(self) -> None:
        (error,) = Framer().feed(b"FOO\n")
        assert isinstance(error, ProtocolError)
        assert error.__traceback__ is None


class _CountingBuffer(bytearray):
    """A receive buffer that counts the bytes which searches look at."""

    looked_at = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        stop = len(self) if end is None else min(end, len(self))
        found = super().find(sub, start, stop)
        self.looked_at += (found if found >= 0 else stop) - start
        return found


@pytest.mark.parametrize(
    "data",
    [
        b"GEN " + b"A" * 60_000 + b"\n",
        b"A" * 100_000 + b"\nPING\n",
        b"PING\n" * 5_000,
        b"GEN bytes=50000\n" + b"A" * 50_000 + b"\n",
        b"GEN bytes=2000000\n" + b"A" * 50_000,
    ],
)
@pytest.mark.parametrize("size", [1, 13, 1 << 20])
def test_every_byte_is_searched_once_however_it_arrives(data: bytes, size: int) -> None:
    framer = Framer()
    framer._buffer = buffer = _CountingBuffer()
    for piece in pieces(data, size):
        framer.feed(piece)
    assert framer._buffer is buffer
    assert buffer.looked_at <= len(data) + size
