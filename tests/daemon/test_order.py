"""In which order commands are answered, and what runs beside what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running


async def test_commands_are_answered_one_after_another_completely(client: Client) -> None:
    client.send("GEN max=3 Hello", "STAT session", "PING", "VERSION")
    generation = await client.until("DONE")
    assert generation[0].startswith("ACK 1 prompt_tokens=")
    assert all(line.startswith("TOK 1 ") for line in generation[1:-1])
    assert "finish=length tokens=3 " in generation[-1]
    figures = await client.until("END")
    assert "STAT generated_tokens_total 3" in figures
    assert "STAT requests_length_total 1" in figures
    assert await client.line() == "PONG"
    assert (await client.line()).startswith("VERSION ")


async def test_a_request_with_an_id_runs_beside_what_follows(client: Client) -> None:
    client.send("GEN id=long max=60000 Hello", "PING", "CANCEL long")
    lines = await client.until("DONE")
    assert lines[0].startswith("ACK long ")
    assert lines.index("PONG") < lines.index("OK") < len(lines) - 1
    assert lines[-1].startswith("DONE long finish=cancelled")


async def test_no_line_of_a_request_comes_between_the_lines_of_another_reply(client: Client) -> None:
    client.send("GEN id=a max=60000 Hello", "GEN id=b max=60000 Hello")
    for _ in range(20):
        client.send("STAT", "HELP GEN")
    blocks = 0
    inside = False
    while blocks < 40:
        line = await client.line()
        is_request = line.startswith(("ACK", "TOK", "INFO", "DONE"))
        assert not (inside and is_request)
        inside = line != "END" and not is_request
        blocks += line == "END"


async def test_ids_are_counted_on_the_connection_and_skip_those_in_use(client: Client) -> None:
    client.send("GEN id=1 max=60000 Hello", "GEN max=1 Hello", "GEN max=1 Hello")
    assert (await client.until("DONE"))[-1].startswith("DONE 2 ")
    assert (await client.until("DONE"))[-1].startswith("DONE 3 ")


async def test_chats_of_a_session_run_in_order_and_see_the_answers_before_them(client: Client) -> None:
    client.send("CHAT id=a max=5 Hello", "CHAT id=b max=5 Hello", "CHAT id=c max=5 Hello", "PING")
    lines = [line for line in await client.until("DONE c") if not line.startswith("TOK")]
    requests = [line.split()[:2] for line in lines if line != "PONG"]
    assert requests == [[word, id] for id in "abc" for word in ("ACK", "DONE")]
    prompts = [int(line.split("prompt_tokens=")[1].split()[0]) for line in lines if line.startswith("ACK")]
    assert prompts[0] < prompts[1] < prompts[2]


async def test_generations_of_a_session_run_at_the_same_time(client: Client) -> None:
    client.send("GEN id=a max=60000 Hello", "GEN id=b max=5 Hello")
    assert (await client.until("DONE"))[-1].startswith("DONE b finish=length")


async def test_a_chat_that_waits_for_its_turn_can_be_cancelled(client: Client) -> None:
    client.send("CHAT id=a max=60000 Hello", "CHAT id=b max=5 Hello", "CANCEL b")
    lines = await client.until("DONE b")
    assert "OK" in lines
    assert lines[-2].startswith("ACK b prompt_tokens=0 ")
    assert "finish=cancelled tokens=0" in lines[-1]
    client.send("CANCEL a")
    await client.until("DONE a finish=cancelled")
    figures = await client.stat("session")
    assert (figures["requests_total"], figures["requests_cancelled_total"]) == ("2", "2")


async def test_reset_waits_for_what_runs_and_forgets_the_dialogue(client: Client) -> None:
    client.send("CHAT max=5 Hello", "CHAT id=a max=200 Hello", "RESET", "CHAT max=5 Hello")
    first = (await client.words("ACK"))["prompt_tokens"]
    await client.until("DONE 1")
    longer = (await client.words("ACK"))["prompt_tokens"]
    lines = await client.until("OK")
    assert lines[-2].startswith("DONE a finish=length")
    again = (await client.words("ACK"))["prompt_tokens"]
    assert int(longer) > int(first) == int(again)


async def test_reset_does_not_wait_for_chats_that_come_after_it(running: Running) -> None:
    one, other = await running.connect(), await running.connect()
    for client in (one, other):
        assert await client.ask("SESSION shared") in (
            "OK session=shared new=1",
            "OK session=shared new=0",
        )
    one.send("CHAT id=a max=300 Hello", "RESET", "PING")
    await one.until("ACK a")
    other.send("CHAT id=b max=5 Hello")
    lines = await one.until("PONG")
    assert lines[-3].startswith("DONE a")
    assert lines[-2] == "OK"
    assert (await other.until("DONE"))[-1].startswith("DONE b finish=length")


async def test_quit_cancels_what_runs_on_the_connection_then_says_bye(client: Client) -> None:
    client.send("GEN id=a max=60000 Hello", "CHAT id=b max=60000 Hello", "CHAT id=c Hello", "QUIT", "PING")
    lines = await client.rest()
    done = [line for line in lines if line.startswith("DONE")]
    assert len(done) == 3
    assert all("finish=cancelled" in line for line in done)
    assert lines[-1] == "OK bye"


async def test_session_and_set_affect_later_commands_alone(client: Client) -> None:
    client.send("GEN id=a max=60000 Hello", "SESSION named", "SET max 2", "GEN Hello", "GEN max=1 Hello")
    assert (await client.words("ACK"))["session"] == "~1"
    assert (await client.until("OK session"))[-1] == "OK session=named new=1"
    await client.until("OK")
    lines = await client.until("DONE 1")
    assert "tokens=2" in lines[-1]
    assert any(line.startswith("ACK 1") and line.endswith("session=named") for line in lines)
    assert "tokens=1" in (await client.until("DONE 2"))[-1]
    # The request is one of the session that it was made in.
    client.send("CANCEL a")
    assert (await client.until("ERR"))[-1].startswith("ERR NOT_FOUND")


async def test_anything_of_a_session_can_be_cancelled_from_its_other_connection(running: Running) -> None:
    one, other = await running.connect(), await running.connect()
    await one.ask("SESSION shared")
    await other.ask("SESSION shared")
    one.send("GEN max=60000 Hello")
    await one.until("TOK")
    assert await other.ask("CANCEL 1") == "OK"
    assert "finish=cancelled" in (await one.until("DONE"))[-1]


async def test_two_sessions_may_use_the_same_id_and_cancel_ends_only_their_own(running: Running) -> None:
    one, other = await running.connect(), await running.connect()
    for client in (one, other):
        client.send("GEN id=a max=60000 Hello")
        await client.until("ACK a")
    one.send("CANCEL a")
    await one.until("DONE a finish=cancelled")
    await running.figures_when(requests_running="1", requests_cancelled_total="1")


async def test_a_flood_of_short_commands_is_answered_one_by_one_from_a_bounded_backlog(
    running: Running,
) -> None:
    client = await running.connect()
    sizes: list[int] = []

    async def watch() -> None:
        while True:
            sizes.extend(len(connection._waiting) for connection in running.daemon._connections)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    client.writer.write(b"PING\n" + b"x\n" * 30_000 + b"PING\n")
    client.end()
    lines = await client.rest()
    watching.cancel()
    assert (lines[0], lines[-1], len(lines)) == ("PONG", "PONG", 30_002)
    assert all(line.startswith("ERR UNKNOWN_VERB") for line in lines[1:-1])
    assert 100 < max(sizes) < 3000
