"""Clients that go away, stop talking or stop reading, and what that costs the others: nothing."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running, Serve


async def test_a_half_closed_client_gets_all_of_its_output(client: Client) -> None:
    client.send("GEN max=20 Hello", "GEN id=a max=300 Hello", "STAT session")
    client.end()
    lines = await client.rest()
    assert any(line.startswith("DONE 1 finish=length tokens=20 ") for line in lines)
    assert any(line.startswith("DONE a finish=length tokens=300 ") for line in lines)
    assert "END" in lines


async def test_an_unterminated_last_line_is_not_executed(client: Client) -> None:
    client.writer.write(b"PING\nQUI")
    client.end()
    lines = await client.rest()
    assert lines[0] == "PONG"
    assert lines[1].startswith("ERR BAD_REQUEST")
    assert len(lines) == 2


async def test_a_client_that_resets_while_its_answer_comes_is_cancelled(running: Running) -> None:
    client = await running.connect()
    client.send("GEN max=60000 Hello")
    await client.until("TOK")
    client.reset()
    figures = await running.figures_when(requests_running="0", sessions_current="0")
    assert figures["requests_cancelled_total"] == "1"


async def test_a_client_that_closes_while_its_answer_comes_is_not_taken_for_half_closed(
    running: Running,
) -> None:
    client = await running.connect()
    client.send("GEN max=60000 Hello")
    await client.until("TOK")
    client.writer.close()
    await running.figures_when(requests_running="0", requests_cancelled_total="1", sessions_current="0")


async def test_a_client_that_goes_in_the_queue_never_starts(serve: Serve) -> None:
    running = await serve(max_running=1)
    first, second = await running.connect(), await running.connect()
    first.send("GEN max=60000 Hello")
    await first.until("TOK")
    second.send("GEN max=60000 Hello")
    await second.until("ACK")
    second.writer.close()  # noticed by the INFO lines, which cannot be delivered
    figures = await running.figures_when(requests_waiting="0", requests_cancelled_total="1")
    assert figures["requests_running"] == "1"


async def test_a_client_that_goes_in_prefill_stops_it(running: Running) -> None:
    client = await running.connect()
    ids = ",".join(["5"] * 30_000)
    client.send(f"GEN bytes={len(ids)} ids=1", ids)
    await client.until("ACK")
    client.reset()
    figures = await running.figures_when(requests_running="0", requests_cancelled_total="1")
    assert figures["generated_tokens_total"] == "0"


async def test_the_place_in_the_queue_is_told_while_nothing_else_is_sent(serve: Serve) -> None:
    running = await serve(max_running=1)
    busy, waiting = await running.connect(), await running.connect()
    busy.send("GEN id=a max=60000 Hello")
    await busy.until("TOK")
    waiting.send("GEN max=1 Hello", "GEN id=b max=1 Hello")
    waiting.end()
    assert (await waiting.until("INFO"))[-1] == "INFO 1 queue=1"
    busy.send("QUIT")
    assert "DONE b" in " ".join(await waiting.rest())


async def test_the_partial_answer_of_a_lost_client_stays_in_its_named_dialogue(running: Running) -> None:
    client = await running.connect()
    client.send("SESSION kept", "CHAT max=2 Hello")
    short = int((await client.words("ACK"))["prompt_tokens"])
    await client.until("DONE")
    client.send("RESET", "CHAT max=60000 Hello")
    for _ in range(20):
        await client.until("TOK")
    client.reset()
    await running.figures_when(requests_running="0", requests_cancelled_total="1", sessions_current="1")
    again = await running.connect()
    assert await again.ask("SESSION kept") == "OK session=kept new=0"
    again.send("CHAT max=2 Hello")
    assert int((await again.words("ACK"))["prompt_tokens"]) > 2 * short


@pytest.mark.parametrize("half", ["GEN max=1 hal", "GEN bytes=10\nhal"])
async def test_half_a_command_that_stands_still_is_timed_out(serve: Serve, half: str) -> None:
    client = await (await serve(half_command_seconds=0.1)).connect()
    client.writer.write(half.encode())
    assert (await client.rest())[0].startswith("ERR TIMEOUT")


async def test_time_that_a_request_runs_does_not_count_as_standing_still(serve: Serve) -> None:
    client = await (await serve(half_command_seconds=0.1, idle_seconds=0.1)).connect()
    client.send("GEN id=a max=1000 Hello")
    client.writer.write(b"CANC")
    lines = await client.rest()
    assert lines[-2].startswith("DONE a finish=length")
    assert lines[-1].startswith("ERR TIMEOUT")


async def test_an_idle_connection_is_closed_only_where_a_time_is_set(serve: Serve) -> None:
    client = await (await serve(idle_seconds=0.1)).connect()
    await client.ask("PING")
    assert (await client.rest())[0].startswith("ERR TIMEOUT")


async def connect_without_reading(running: Running) -> socket.socket:
    """A socket with small buffers, from which nothing is read."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, running.place)
    return one


async def test_a_reader_that_never_reads_is_ended_and_costs_a_bounded_buffer(serve: Serve) -> None:
    running = await serve(write_seconds=0.3)
    one = await connect_without_reading(running)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(one, b"GEN id=a max=60000 Hello\n" + b"HELP\n" * 20_000)
    figures = await running.figures_when(slow_readers_total="1", connections_current="1")
    assert figures["requests_cancelled_total"] == "1"
    one.close()


async def test_a_slow_reader_delays_itself_only(serve: Serve) -> None:
    running = await serve(write_seconds=30.0)
    one = await connect_without_reading(running)
    await asyncio.get_running_loop().sock_sendall(one, b"GEN max=60000 Hello\n" + b"HELP\n" * 20_000)
    other = await running.connect()
    for _ in range(3):
        other.send("GEN max=50 Hello", "STAT")
        await other.until("END")
    one.close()


async def test_more_output_than_the_buffer_holds_ends_the_connection_at_once(serve: Serve) -> None:
    running = await serve(output_buffer_bytes=4096, write_seconds=60.0)
    one = await connect_without_reading(running)
    await asyncio.get_running_loop().sock_sendall(one, b"GEN id=a max=60000 Hello\n" + b"HELP\n" * 20_000)
    await running.figures_when(slow_readers_total="1", requests_cancelled_total="1", connections_current="1")
    one.close()
