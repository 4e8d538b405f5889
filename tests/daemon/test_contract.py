"""Small promises of the protocol and of the figures, each of which was broken once."""

from __future__ import annotations

from typing import Any

from coli_server.telemetry.table import FIGURES


async def test_every_figure_is_there_with_default_settings(serve: Any) -> None:
    client = await (await serve()).connect()
    assert {figure.name for figure in FIGURES} - (await client.stat()).keys() == set()
    assert {figure.name for figure in FIGURES if figure.session} - (
        await client.stat("session")
    ).keys() == set()


async def test_a_chat_that_waits_for_its_turn_minds_its_deadline(client: Any) -> None:
    client.send("CHAT id=a max=60000 Hello")
    await client.until("TOK a ")
    client.send("CHAT id=b deadline_ms=50 max=4 Hello again")
    lines = await client.until("DONE b ")
    assert "finish=deadline tokens=0" in lines[-1]
    client.send("CANCEL a")
    await client.until("DONE a ")
    figures = await client.stat("session")
    assert (figures["requests_deadline_total"], figures["requests_cancelled_total"]) == ("1", "1")
    assert figures["requests_total"] == "2"


async def test_nothing_is_said_of_a_request_before_its_ack(running: Any) -> None:
    """After the end of input INFO comes each second, but never before ACK."""
    client = await running.connect()
    client.send("CHAT id=a max=60000 deadline_ms=2500 Hello", "CHAT id=b max=2 Hello again")
    client.end()
    lines = await client.rest()
    words = [line.split(" ")[0] for line in lines if line.split(" ")[1:2] == ["b"]]
    assert words[0] == "ACK"
    assert words[-1] == "DONE"


async def test_the_work_of_no_session_can_be_seen(serve: Any) -> None:
    running = await serve(pilot=True, slots=8)
    client = await running.connect()
    client.send("GEN id=x max=40 temp=1 Hello")
    await client.until("DONE x ")
    await running.figures_when(prefetch_in_flight="0")
    everything, own = await client.stat(), await client.stat("session")
    system = await client.stat("session ~system")
    assert int(system["loads"]) > 0
    assert int(everything["loads"]) == int(own["loads"]) + int(system["loads"])
    assert int(everything["load_bytes"]) == int(own["load_bytes"]) + int(system["load_bytes"])
