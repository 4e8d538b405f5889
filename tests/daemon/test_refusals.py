"""What is refused, and that nothing else is lost by it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running, Serve


async def test_a_refused_command_is_answered_in_its_place(client: Client) -> None:
    client.send("PING", "FLY", "GEN colour=red Hello", "GEN max=0 Hello", "GEN", "PING")
    codes = [(await client.line()).split()[:2] for _ in range(6)]
    assert codes == [
        ["PONG"],
        ["ERR", "UNKNOWN_VERB"],
        ["ERR", "BAD_OPTION"],
        ["ERR", "BAD_OPTION"],
        ["ERR", "BAD_REQUEST"],
        ["PONG"],
    ]


async def test_the_same_id_twice_is_refused_while_the_first_runs(client: Client) -> None:
    client.send("GEN id=a max=60000 Hello", "GEN id=a max=1 Hello")
    assert (await client.until("ERR"))[-1].startswith("ERR DUPLICATE_ID id=a ")
    client.send("CANCEL a")
    await client.until("DONE a")
    client.send("GEN id=a max=1 Hello")
    await client.until("DONE a finish=length")


async def test_too_many_requests_of_a_connection_are_told_to_come_back(serve: Serve) -> None:
    client = await (await serve(requests_per_connection=2)).connect()
    client.send("GEN id=a max=60000 x", "CHAT id=b max=60000 x", "GEN id=c x", "GEN x")
    for id in ("id=c ", ""):
        line = (await client.until("ERR"))[-1]
        assert line.startswith(f"ERR BUSY {id}retry_ms=")


async def test_a_full_queue_is_told_before_ack_and_places_are_counted(serve: Serve) -> None:
    running = await serve(max_running=1, queue_length=2)
    client = await running.connect()
    client.send(*(f"GEN id={id} max=60000 x" for id in "abcd"))
    assert (await client.until("ERR"))[-1].startswith("ERR BUSY id=d retry_ms=")
    figures = await running.figures_when(requests_running="1", requests_waiting="2")
    assert figures["requests_total"] == "3"
    # The line that tells the place comes when nothing else is sent; request a is never silent for so long.
    client.send("CANCEL a", "CANCEL b")
    await client.until("DONE b finish=cancelled")
    await running.figures_when(requests_running="1", requests_waiting="0", requests_cancelled_total="2")


async def test_a_prompt_that_does_not_fit_is_refused_with_figures_and_max_is_clamped(serve: Serve) -> None:
    client = await (await serve(context=300)).connect()
    ids = ",".join(["5"] * 300)
    line = await client.ask(f"GEN id=a ids=1 {ids}")
    assert line.startswith("ERR CONTEXT_EXCEEDED id=a prompt_tokens=300 capacity=300 ")
    client.send(f"GEN max=1000 ids=1 {ids[:-4]}")  # two tokens less
    assert (await client.until("DONE"))[-1].startswith("DONE 1 finish=length tokens=2 prompt_tokens=298 ")


async def test_a_token_id_outside_the_vocabulary_is_refused(client: Client) -> None:
    assert await client.ask("GEN ids=1 1,512") == "ERR BAD_REQUEST token id 512 is not in [0, 512)"
    client.send("GEN ids=1 max=1 1,511")
    await client.until("DONE")


async def test_nobody_can_attach_to_an_anonymous_session(running: Running) -> None:
    client = await running.connect()
    client.send("GEN max=1 x")
    assert (await client.words("ACK"))["session"] == "~1"
    assert (await (await running.connect()).ask("SESSION ~1")).startswith("ERR BAD_REQUEST")


async def test_cancelling_what_does_not_run_is_not_found(client: Client) -> None:
    assert (await client.ask("CANCEL 7")).startswith("ERR NOT_FOUND")


async def test_over_the_connection_limit_a_client_is_told_and_the_others_are_served(serve: Serve) -> None:
    running = await serve(max_connections=1)
    first = await running.connect()
    assert await first.ask("PING") == "PONG"
    refused = await running.connect()
    refused.send("PING")
    assert (await refused.line()).startswith("ERR TOO_MANY_CLIENTS")
    figures = await first.stat("server")
    assert (figures["connections_total"], figures["connections_rejected_total"]) == ("1", "1")
    # One that was refused takes nobody's place, though it has not gone yet.
    first.send("QUIT")
    await first.rest()
    for _ in range(100):
        second = await running.connect()
        if await second.ask("PING") == "PONG":
            break
    assert await second.ask("PING") == "PONG"


async def test_a_bug_fails_one_command_and_not_the_connection(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    client = await running.connect()
    monkeypatch.setattr("coli_server.daemon.figures.Figures.everything", broken)
    line = await client.ask("STAT")
    assert line.startswith("ERR INTERNAL")
    assert "secret" not in line
    monkeypatch.undo()
    monkeypatch.setattr("coli_server.daemon.prompts.Prompts.of_text", broken)
    assert (await client.ask("GEN id=a x")).startswith("ERR INTERNAL id=a ")
    monkeypatch.undo()
    client.send("GEN id=a max=1 x")
    await client.until("DONE a finish=length")


async def test_http_is_refused_and_the_connection_closed(client: Client) -> None:
    client.send("GET /stat HTTP/1.1\r", "Host: x\r", "\r")
    lines = await client.rest()
    assert len(lines) == 1
    assert lines[0].startswith("ERR HTTP")


async def test_what_comes_after_an_error_that_closes_is_dropped_and_the_error_can_be_read(
    client: Client,
) -> None:
    client.send("GEN bytes=+5 x")
    client.writer.write(b"PING\n" * 100_000)  # unread input would reset the connection
    lines = await client.rest()
    assert len(lines) == 1
    assert lines[0].startswith("ERR BAD_REQUEST")


PIECES = (
    b"GEN ",
    b"CHAT ",
    b"id=a ",
    b"max=2 ",
    b"bytes=3 ",
    b"bytes=99999999999 ",
    b'stop="',
    b"Hello",
    b'"\\ud800"',
    b"\xff",
    b"\0",
    b"\r",
    b"\n",
    b"\n",
    b"\n",
    b"SET temp 1\n",
    b"SESSION x\n",
    b"RESET\n",
    b"STAT session\n",
    b"CANCEL a\n",
    b"A" * 70_000,
)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_bytes_come_each_request_has_one_last_line_and_the_daemon_goes_on(
    running: Running, seed: int
) -> None:
    chance = random.Random(seed)
    client = await running.connect()
    for _ in range(chance.randrange(1, 40)):
        client.writer.write(chance.choice(PIECES))
    client.end()
    lines = await client.rest()
    accepted = [line.split()[1] for line in lines if line.startswith("ACK ")]
    done = [line.split()[1] for line in lines if line.startswith("DONE ")]
    assert sorted(accepted) == sorted(done)
    assert all(line.startswith(("ACK", "TOK", "INFO", "DONE", "ERR", "OK", "STAT", "END")) for line in lines)
    other = await running.connect()
    assert await other.ask("PING") == "PONG"
