"""Trying again, and several connections: against a scripted server, whose faults are exact."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from coli_client import AsyncClient, Backoff, Busy, Client, ConnectionLost, Draining, Pool, retry

STAT = b"STAT lookups 1\nEND\n"
QUICK = Backoff(attempts=3, first=0.001, most=0.002)


def answers(*replies: bytes):
    """A connection that answers one command after another, then is closed by the client."""

    def script(peer) -> None:
        for reply in replies:
            assert peer.next().line
            peer.send(reply)
        peer.rest()

    return script


def lost(peer) -> None:
    peer.next()
    peer.reset()


def test_waits_grow_up_to_the_most_and_are_one_fewer_than_attempts() -> None:
    assert list(Backoff(attempts=5, first=1, factor=3, most=5, jitter=0).waits()) == [1, 3, 5, 5]
    assert list(Backoff(attempts=1).waits()) == []
    assert all(0.5 <= wait <= 1 for wait in Backoff(attempts=99, first=1, factor=1, jitter=0.5).waits())


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"first": -1}, {"factor": 0.5}, {"most": -1}, {"jitter": 2}]
)
def test_a_backoff_out_of_range_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Backoff(**wrong)


def test_retry_connects_anew_after_a_loss(serve) -> None:
    port = serve(lost, lost, answers(STAT))
    with Client("127.0.0.1", port) as client:
        assert retry(client, lambda c: c.stat("cache"), QUICK) == {"lookups": "1"}


def test_retry_raises_the_last_error(serve) -> None:
    port = serve(lost, lost, lost)
    with Client("127.0.0.1", port) as client, pytest.raises(ConnectionLost):
        retry(client, Client.stat, QUICK)


def test_retry_does_not_repeat_what_is_wrong(serve) -> None:
    port = serve(answers(b"ERR BAD_REQUEST no such section\n"))
    with Client("127.0.0.1", port) as client, pytest.raises(Exception, match="no such section"):
        retry(client, lambda c: c.stat("nonsense"), QUICK)


async def test_the_pool_asks_again_after_a_loss(serve) -> None:
    port = serve(lost, answers(STAT, STAT))
    async with Pool("127.0.0.1", port, backoff=QUICK) as pool:
        assert await pool.stat() == {"lookups": "1"}
        assert await pool.stat() == {"lookups": "1"}  # on the same connection


async def test_the_pool_waits_as_long_as_a_busy_server_asks(serve) -> None:
    def script(peer) -> None:
        for _ in range(2):
            seen = peer.next()
            peer.send(b"ERR BUSY id=%b retry_ms=300 full\n" % seen.id)
        peer.done(peer.accept())
        peer.rest()

    port = serve(script)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with Pool("127.0.0.1", port, backoff=QUICK) as pool:
        assert (await pool.generate("x")).tokens == 2
    assert loop.time() - began >= 0.6


async def test_a_refusal_is_raised_when_no_attempt_is_left(serve) -> None:
    def script(peer) -> None:
        for _ in range(3):
            seen = peer.next()
            peer.send(b"ERR DRAINING id=%b going down\n" % seen.id)
        peer.rest()

    port = serve(script)
    async with Pool("127.0.0.1", port, backoff=QUICK) as pool:
        with pytest.raises(Draining):
            await pool.generate("x")


async def test_what_was_accepted_is_not_sent_again(serve) -> None:
    def script(peer) -> None:
        peer.accept()
        peer.reset()

    port = serve(script)
    async with Pool("127.0.0.1", port, backoff=QUICK) as pool:
        with pytest.raises(ConnectionLost):
            await pool.generate("x")


async def test_no_more_connections_than_its_size(serve) -> None:
    # A second connection would find nobody who answers.
    port = serve(answers(STAT, STAT, STAT))
    async with Pool("127.0.0.1", port, size=1, backoff=Backoff(attempts=1)) as pool:
        assert await asyncio.gather(*(pool.stat() for _ in range(3))) == [{"lookups": "1"}] * 3


async def test_leaving_a_stream_cancels_it(serve) -> None:
    def script(peer) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\n' % id)
        with contextlib.suppress(ConnectionError):  # the pool may close before it is answered
            peer.cancelled(id)
            peer.rest()

    port = serve(script)
    async with Pool("127.0.0.1", port, backoff=QUICK) as pool:
        stream = pool.stream("x")
        async for chunk in stream:
            assert chunk.text == "a"
            break
        await stream.aclose()


async def test_a_session_block_has_a_connection_of_its_own(serve) -> None:
    port = serve(answers(b"OK session=friday new=1\n", b"PONG\n"))
    client = AsyncClient("127.0.0.1", port)
    async with client.session("friday") as talk:
        assert talk is not client
        await talk.ping()


async def test_a_session_that_is_refused_leaves_no_connection_open(serve) -> None:
    port = serve(answers(b"ERR FORBIDDEN somebody else's\n"))
    with pytest.raises(Exception, match="somebody else"):
        async with AsyncClient("127.0.0.1", port).session("friday"):
            pass


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        Pool(size=0)
    with pytest.raises(TypeError):
        Pool(colour="red")


def test_busy_without_a_hint_waits_as_the_backoff_says() -> None:
    from coli_client.backoff import at_least

    assert at_least(0.5, Busy("BUSY", "full")) == 0.5
    assert at_least(0.5, Busy("BUSY", "full", None, {"retry_ms": "2000"})) == 2.0
