"""The asyncio client against a scripted server."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from coli_client import (
    AsyncClient,
    BadOption,
    Busy,
    Chunk,
    ConnectionLost,
    Info,
    NotFound,
    ProtocolViolation,
    RequestFailed,
    ServerClosed,
    Session,
    Stats,
    Timeout,
)
from coli_client.link import HIGH_WATER


def ping(peer: Any) -> None:
    assert peer.next().line == b"PING"
    peer.send(b"PONG\n")


def closing(peer: Any) -> None:
    assert peer.rest() in (b"QUIT\n", b"")


async def eventually(condition: Any) -> None:
    """Lets the loop run until `condition()` holds."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within 5 s")


async def test_commands(serve: Any) -> None:
    def script(peer: Any) -> None:
        ping(peer)
        for line, reply in [
            (b"VERSION", b"VERSION 0.1.0 protocol=1\n"),
            (b"HELP gen", b"GEN x\n  y\nEND\n"),
            (b"STAT cache", b"STAT a 1\nEND\n"),
            (b"STAT line", b"STAT 1 2 3 4 5 0\n"),
            (b"STAT reset", b"RESET\n"),
            (b"SESSION s", b"OK session=s new=1\n"),
            (b"SET temp 0.5", b"OK\n"),
            (b"CANCEL x", b"ERR NOT_FOUND nothing runs by that id\n"),
            (b"RESET", b"OK\n"),
        ]:
            assert peer.next().line == line
            peer.send(reply)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        await client.ping()
        assert (await client.version()).version == "0.1.0"
        assert await client.help("gen") == "GEN x\n  y"
        assert await client.stat("cache") == Stats(a="1")
        assert (await client.stat_line()).tokens == 1
        await client.stat_reset()
        assert await client.session("s") == Session("s", True)
        await client.set("temp", 0.5)
        with pytest.raises(NotFound):
            await client.cancel("x")
        await client.reset()


async def test_chunks_stream_before_the_end(serve: Any) -> None:
    read = threading.Event()

    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'INFO %b prefill=1/3\nTOK %b "He"\n' % (id, id))
        assert read.wait(5)
        peer.send(b'TOK %b "llo"\n' % id)
        peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x", max=2)
        ack = await generation.accepted()
        assert (ack.prompt_tokens, ack.session) == (3, "~1")
        events = generation.events()
        assert await anext(events) == Info(generation.id, {"prefill": "1/3"})
        assert await anext(events) == Chunk(generation.id, "He")
        assert generation.text == "He"
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = generation.result
        read.set()
        assert [str(event) async for event in events] == ["llo"]
        assert generation.text == generation.result.text == "Hello"
        assert [chunk async for chunk in generation] == []


async def test_await_gives_the_whole(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nTOK %b "b"\n' % (id, id))
        peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        result = await client.chat("x")
        assert (result.text, result.finish, result.session) == ("ab", "length", "~1")


async def test_generations_run_side_by_side_and_never_mix(serve: Any) -> None:
    def script(peer: Any) -> None:
        a, b = peer.accept(), peer.accept()
        peer.send(b'TOK %b "b1"\nTOK %b "a1"\n' % (b, a))
        ping(peer)
        peer.send(b'TOK %b "a2"\nTOK %b "b2"\n' % (a, b))
        peer.done(b)
        peer.done(a)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        a, b = client.generate("x"), client.generate("y")
        await client.ping()
        assert (await a).text == "a1a2"
        assert (await b).text == "b1b2"


async def test_generations_are_awaitables_like_any_other(serve: Any) -> None:
    def script(peer: Any) -> None:
        for _ in range(3):
            id = peer.accept()
            peer.send(b'TOK %b "a"\n' % id)
            peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        first, second = await asyncio.gather(client.generate("x"), client.generate("y"))
        third = await asyncio.wait_for(client.generate("z"), 5)
        assert [result.text for result in (first, second, third)] == ["a", "a", "a"]


async def test_connecting_twice_makes_one_connection(serve: Any) -> None:
    client = AsyncClient(port=serve(lambda peer: (ping(peer), closing(peer))))
    await asyncio.gather(client.connect(), client.connect())
    await client.ping()
    await client.connect()
    await client.close()


async def test_commands_are_answered_each_with_its_own(serve: Any) -> None:
    def script(peer: Any) -> None:
        for _ in range(20):
            section = peer.next().line.removeprefix(b"STAT session ")
            peer.send(b"STAT name %b\nEND\n" % section)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        replies = await asyncio.gather(*(client.stat("session", f"s{n}") for n in range(20)))
        assert [reply["name"] for reply in replies] == [f"s{n}" for n in range(20)]


async def test_wrong_arguments_send_nothing(serve: Any) -> None:
    async with AsyncClient(port=serve(lambda peer: (ping(peer), closing(peer)))) as client:
        with pytest.raises(TypeError, match="unknown option 'maximum'"):
            client.generate("x", maximum=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="must be 1 to 64"):
            await client.session("a\nQUIT")
        await client.ping()


async def test_a_refusal_is_raised_where_it_is_awaited(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.next().id
        peer.send(b"ERR BUSY id=%b retry_ms=250 the queue is full\n" % id)
        peer.next()
        peer.send(b"ERR BAD_OPTION max=0 is refused\n")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        busy, bad = client.generate("x"), client.generate("y", max=0)
        with pytest.raises(Busy) as refused:
            await busy.accepted()
        assert refused.value.retry_ms == 250
        with pytest.raises(BadOption):
            await bad
        await client.ping()


async def test_one_failure_leaves_the_others(serve: Any) -> None:
    def script(peer: Any) -> None:
        a, b = peer.accept(), peer.accept()
        peer.send(b'TOK %b "a"\nERR MODEL id=%b broken\nTOK %b "b"\n' % (a, a, b))
        peer.done(b)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        a, b = client.generate("x"), client.generate("y")
        with pytest.raises(RequestFailed, match="broken"):
            await a
        assert a.text == "a"
        assert (await b).text == "b"


async def test_break_cancels_and_the_next_command_gets_its_own_reply(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nTOK %b "b"\n' % (id, id))
        assert peer.next().line == b"CANCEL " + id
        peer.send(b'TOK %b "c"\nOK\nTOK %b "d"\n' % (id, id))
        peer.done(id, b"finish=cancelled tokens=4 prompt_tokens=3")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        async for chunk in generation:
            assert chunk.text == "a"
            break
        await eventually(lambda: generation.ended)
        assert generation.result.finish == "cancelled"
        await client.ping()


async def test_leaving_a_with_block_cancels(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\n' % id)
        peer.cancelled(id)
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        async with client.generate("x") as generation:
            assert await anext(generation.events()) == Chunk(generation.id, "a")
        await client.ping()
        assert generation.result.finish == "cancelled"


async def test_cancelling_the_awaiting_task_cancels_the_request(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        await generation.accepted()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generation.wait(), 0.01)
        await client.ping()
        assert generation.result.finish == "cancelled"


async def test_cancelling_before_the_acceptance_cancels_after_it(serve: Any) -> None:
    cancelled = threading.Event()

    def script(peer: Any) -> None:
        seen = peer.next()
        assert cancelled.wait(5)
        peer.send(b"ACK %b prompt_tokens=3 session=~1\n" % seen.id)
        peer.cancelled(seen.id)
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        task = asyncio.create_task(client.generate("x").wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await client.ping()


async def test_a_dropped_generation_is_cancelled(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        client.generate("x")
        gc.collect()
        await asyncio.sleep(0)
        await client.ping()


async def test_what_is_cancelled_before_it_is_sent_is_never_sent(serve: Any) -> None:
    answer = threading.Event()

    def script(peer: Any) -> None:
        assert peer.next().line == b"RESET"
        assert answer.wait(5)
        peer.send(b"OK\n")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        reset = asyncio.create_task(client.reset())
        await asyncio.sleep(0)
        generation = client.generate("x", id="a")
        version = asyncio.create_task(client.version())
        await asyncio.sleep(0)
        version.cancel()
        result = await generation.cancel()
        assert (result.finish, result.tokens) == ("cancelled", 0)
        with pytest.raises(ConnectionLost, match="before it was sent"):
            await generation.accepted()
        answer.set()
        await reset
        await client.ping()


async def test_a_cancelled_command_does_not_hand_its_reply_to_the_next(serve: Any) -> None:
    cancelled = threading.Event()

    def script(peer: Any) -> None:
        assert peer.next().line == b"VERSION"
        assert cancelled.wait(5)
        peer.send(b"VERSION 0.1.0 protocol=1\n")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.version(), 0.01)
        cancelled.set()
        await client.ping()


async def test_cancel_of_what_has_just_ended_is_no_error(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        assert peer.next().line == b"CANCEL " + id
        peer.done(id)
        peer.send(b"ERR NOT_FOUND nothing runs by that id\n")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        await generation.accepted()
        assert (await generation.cancel()).finish == "length"
        assert (await generation.cancel()).finish == "length"
        await client.ping()


async def test_an_id_runs_once_at_a_time(serve: Any) -> None:
    def script(peer: Any) -> None:
        for _ in range(2):
            peer.done(peer.accept())
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        first = client.generate("x", id="a")
        with pytest.raises(ValueError, match="id='a' is running"):
            client.generate("y", id="a")
        await first
        await client.generate("y", id="a")


async def test_a_slow_reader_stops_reading_and_loses_nothing(serve: Any) -> None:
    many = 30_000

    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "%b"\n' % (id, b"x" * 100) * many)
        peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        events = generation.events()
        await anext(events)
        await eventually(lambda: not generation._link._reading)
        unread = len(generation._stream.unread)
        assert HIGH_WATER <= unread < many / 3
        await asyncio.sleep(0.01)
        assert len(generation._stream.unread) == unread
        assert 1 + len([event async for event in events]) == many
        assert len(generation.text) == 100 * many


async def test_a_command_in_the_middle_of_a_full_stream_is_answered(serve: Any) -> None:
    """Or a reader would wait for ever for a reply that stands behind its own unread chunks."""

    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "x"\n' % id * 10 * HIGH_WATER)
        ping(peer)
        peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        await generation.accepted()
        await eventually(lambda: not generation._link._reading)
        chunks = aiter(generation)
        await anext(chunks)
        await client.ping()
        assert 1 + len([chunk async for chunk in chunks]) == 10 * HIGH_WATER


async def test_a_generation_behind_a_full_one_is_answered(serve: Any) -> None:
    def script(peer: Any) -> None:
        a = peer.accept()
        peer.send(b'TOK %b "a"\n' % a * 10 * HIGH_WATER)
        b = peer.accept()
        peer.send((b'TOK %b "a"\n' % a + b'TOK %b "b"\n' % b) * 10 * HIGH_WATER)
        peer.done(b)
        peer.done(a)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        a = client.generate("x")
        await a.accepted()
        await eventually(lambda: not a._link._reading)
        assert (await client.generate("y")).text == "b" * 10 * HIGH_WATER
        assert (await a).text == "a" * 20 * HIGH_WATER


async def test_what_still_comes_of_an_abandoned_stream_is_not_kept(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        assert peer.next().line == b"CANCEL " + id
        peer.send(b"OK\n" + b'TOK %b "x"\n' % id * 10 * HIGH_WATER)
        peer.done(id, b"finish=cancelled tokens=640 prompt_tokens=3")
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        await generation.accepted()
        result = await generation.cancel()
        assert result.tokens == len(generation.text) == 10 * HIGH_WATER
        assert not generation._stream.unread


async def test_a_cancellation_is_not_sent_for_what_has_ended_meanwhile(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        assert peer.next().line == b"RESET"
        peer.done(id)
        peer.send(b"OK\n")
        ping(peer)
        closing(peer)

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        await generation.accepted()
        reset = asyncio.create_task(client.reset())
        await asyncio.sleep(0)
        assert (await generation.cancel()).finish == "length"
        await reset
        await client.ping()


async def test_a_slow_reader_is_not_taken_for_a_silent_server(serve: Any) -> None:
    rested = threading.Event()

    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "x"\n' % id * 2 * HIGH_WATER)
        assert rested.wait(5)
        peer.done(id)
        closing(peer)

    async with AsyncClient(port=serve(script), timeout=0.3) as client:
        generation = client.generate("x")
        await generation.accepted()
        await eventually(lambda: not generation._link._reading)
        await asyncio.sleep(0.5)
        rested.set()
        assert (await generation).text == "x" * 2 * HIGH_WATER


async def test_after_a_timeout_no_old_reply_meets_a_new_command(serve: Any) -> None:
    def slow(peer: Any) -> None:
        peer.accept()
        assert peer.next().line == b"VERSION"
        assert peer.next().line == b"QUIT"
        peer.close()

    client = AsyncClient(port=serve(slow, ping), timeout=0.3)
    await client.connect()
    generation = client.generate("x")
    with pytest.raises(Timeout, match=r"silent for 0\.3 s"):
        await client.version()
    with pytest.raises(Timeout):
        await generation
    with pytest.raises(ConnectionLost, match=r"closed.*silent"):
        await client.ping()
    with pytest.raises(ConnectionLost, match="closed"):
        client.generate("y")
    await client.connect()
    await client.ping()
    await client.close()


async def test_a_quiet_connection_that_owes_nothing_stays(serve: Any) -> None:
    async with AsyncClient(
        port=serve(lambda peer: (ping(peer), ping(peer), closing(peer))), timeout=0.2
    ) as client:
        await client.ping()
        await asyncio.sleep(0.3)
        await client.ping()


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_the_server_goes_in_the_middle_of_a_line(serve: Any, end: str) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nTOK %b "b' % (id, id))
        getattr(peer, end)()

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        with pytest.raises(ConnectionLost):
            await generation
        with pytest.raises(ConnectionLost):
            await client.ping()


async def test_the_reason_of_a_closing_server_reaches_all(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.accept()
        assert peer.next().line == b"PING"
        peer.send(b"ERR SLOW_READER output waited too long\n")

    async with AsyncClient(port=serve(script)) as client:
        generation = client.generate("x")
        with pytest.raises(ServerClosed):
            await client.ping()
        with pytest.raises(ServerClosed):
            await generation


async def test_something_else_listens_there(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.next()
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with AsyncClient(port=serve(script)) as client:
        with pytest.raises(ProtocolViolation, match=r"HTTP/1\.1 400"):
            await client.ping()


async def test_a_unix_socket(serve: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "coli")
    with pytest.raises(ConnectionLost, match=f"cannot connect to unix:{path}: "):
        await AsyncClient(f"unix:{path}").connect()
    serve(lambda peer: (ping(peer), closing(peer)), path=path)
    async with AsyncClient(f"unix:{path}") as client:
        await client.ping()


async def test_nobody_listens_there() -> None:
    client = AsyncClient(port=1)
    with pytest.raises(ConnectionLost, match="not connected"):
        client.generate("x")
    with pytest.raises(ConnectionLost, match=r"cannot connect to 127\.0\.0\.1:1"):
        await client.connect()
    await client.close()


async def test_close_during_a_generation_ends_it(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.accept()
        assert peer.next().line == b"QUIT"

    client = AsyncClient(port=serve(script))
    await client.connect()
    generation = client.generate("x")
    await generation.accepted()
    await client.close()
    await client.close()
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await generation


@pytest.mark.parametrize(
    "scenario",
    [
        test_break_cancels_and_the_next_command_gets_its_own_reply,
        test_cancelling_the_awaiting_task_cancels_the_request,
        test_a_slow_reader_stops_reading_and_loses_nothing,
        test_after_a_timeout_no_old_reply_meets_a_new_command,
        test_the_reason_of_a_closing_server_reaches_all,
        test_close_during_a_generation_ends_it,
    ],
)
def test_the_same_on_uvloop(serve: Any, scenario: Any) -> None:
    """Its transports differ from asyncio's own in what they allow around pausing and closing."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(serve))
