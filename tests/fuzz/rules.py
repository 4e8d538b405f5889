"""What holds for any bytes that a client may send. Raises AssertionError where it does not."""

from __future__ import annotations

from collections.abc import Iterable

from coli_server.protocol import VERBS, Command, Event, Framer, Limits, ProtocolError, replies

# Small limits, so that short inputs reach every branch.
LIMITS = Limits(line=96, payload=24)


def check(data: bytes, pieces: Iterable[bytes]) -> None:
    """`data` whole, and the same bytes in `pieces`, give the same events, each of which can be answered."""
    whole, framer = _events([data])
    cut, _ = _events(pieces)
    assert cut == whole, f"the pieces matter: {cut} is not {whole}"
    for event in whole:
        if isinstance(event, Command):
            assert event.verb in VERBS
            (event.text + "".join(map(str, event.options.values()))).encode()
        else:
            assert isinstance(event, ProtocolError)
            line = replies.error(event.code, event.message, id=event.id, details=event.details)
            assert line.endswith(b"\n"), line
            assert line.decode()[:-1].isprintable(), line
    closing = [event for event in whole if isinstance(event, ProtocolError) and event.close]
    assert framer.closed == bool(closing), "only an error that closes ends the stream"
    assert closing in ([], whole[-1:]), "nothing follows an error that closes"
    if not framer.closed and framer.pending is None:
        assert framer.feed(b"PING\n") == [Command("PING")], "out of step"
    _events_end(framer)


def _events(pieces: Iterable[bytes]) -> tuple[list[Event], Framer]:
    framer = Framer(LIMITS)
    return [event for piece in pieces for event in framer.feed(piece)], framer


def _events_end(framer: Framer) -> None:
    for event in framer.end():
        assert isinstance(event, ProtocolError), "half a command was executed"
