"""A bad network, by way of a proxy: what was sent is answered, what is lost costs its own request alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.proxy import Proxy, proxied

from coli_client import AsyncClient, ConnectionLost, Timeout

if TYPE_CHECKING:
    from tests.daemon.conftest import Running, Serve

TALK = b"CHAT id=a max=20 Hello\nGEN max=20 bytes=5\na\nb\nc\nSTAT session\nQUIT\n"


@pytest.fixture
async def proxy(running: Running) -> AsyncIterator[Proxy]:
    async with proxied(running.place) as made:
        yield made


async def talk(proxy: Proxy, data: bytes = TALK, *, end: bool = False) -> list[str]:
    reader, writer = await asyncio.open_connection(*proxy.place)
    writer.write(data)
    if end:
        writer.write_eof()
    try:
        return (await asyncio.wait_for(reader.read(), 20)).decode().splitlines()
    finally:
        writer.close()


def terminal(lines: list[str]) -> list[str]:
    return [" ".join(line.split()[:3]) for line in lines if line.split()[0] in ("DONE", "ERR", "END", "OK")]


WHOLE = ["DONE 1 finish=length", "DONE a finish=length", "END", "OK bye"]


@pytest.mark.parametrize(
    "line",
    [
        {"slice": 1},
        {"slice": 7, "latency": 0.001},
        {"latency": 0.05},
        {"bandwidth": 50_000.0},
        {"slow_close": 0.3},
    ],
    ids=["one byte at a time", "slices", "latency", "bandwidth", "slow close"],
)
async def test_a_slow_line_loses_nothing(proxy: Proxy, line: dict[str, Any]) -> None:
    proxy.between(**line)
    assert sorted(terminal(await talk(proxy))) == WHOLE


async def test_half_closed_input_through_a_slow_line_gets_all_of_its_output(proxy: Proxy) -> None:
    proxy.between(slice=11, latency=0.001, slow_close=0.2)
    lines = await talk(proxy, b"GEN max=30 Hello\nSTAT session\n", end=True)
    assert terminal(lines) == ["DONE 1 finish=length", "END"]


@pytest.mark.parametrize("limit", [1, 5, 28, 29, 49, 50, 53])
async def test_a_stream_that_is_cut_off_executes_no_half_command(
    proxy: Proxy, running: Running, limit: int
) -> None:
    data = b"GEN max=2 Hello one and two\nGEN max=2 bytes=9\nsome text\n"
    proxy.up = type(proxy.up)(limit=limit)
    lines = await talk(proxy, data, end=True)
    whole = sum(end <= limit for end in (28, len(data)))
    assert [line.split()[1] for line in lines if line.startswith("DONE")] == list("12")[:whole]
    assert [line.split()[1] for line in lines if line.startswith("ERR")] == (
        ["BAD_REQUEST"] if limit not in (28, len(data)) else []
    )
    await running.figures_when(requests_running="0", requests_total=str(whole))


@pytest.mark.parametrize("limit", [40, 400])
async def test_a_connection_that_is_reset_in_the_middle_of_an_answer_ends_its_request(
    proxy: Proxy, running: Running, limit: int
) -> None:
    proxy.down = type(proxy.down)(limit=limit, then="reset")
    with pytest.raises(ConnectionError):
        await talk(proxy, b"GEN max=60000 Hello\n")
    figures = await running.figures_when(requests_running="0", requests_cancelled_total="1")
    assert int(figures["generated_tokens_total"]) < 60_000


async def test_a_line_that_goes_dead_while_a_command_is_half_sent_is_noticed(serve: Serve) -> None:
    running = await serve(half_command_seconds=0.2)
    async with proxied(running.place) as proxy:
        proxy.up = type(proxy.up)(limit=10, then="stall")
        lines = await talk(proxy, b"GEN max=2 Hello\n")
    assert terminal(lines) == ["ERR TIMEOUT half"]
    await running.figures_when(half_command_timeouts_total="1")


async def test_a_reader_behind_a_dead_line_is_given_up(serve: Serve) -> None:
    running = await serve(write_seconds=0.3, output_buffer_bytes=4096)
    async with proxied(running.place) as proxy:
        proxy.down = type(proxy.down)(limit=100, then="stall")
        _, writer = await asyncio.open_connection(*proxy.place)
        writer.write(b"GEN id=a max=60000 Hello\n" + b"HELP\n" * 20_000)  # replies of some 40 MB
        figures = await running.figures_when(requests_running="0", slow_readers_total="1")
        writer.close()
    assert figures["requests_cancelled_total"] == "1"


async def test_the_client_says_which_fault_it_met(proxy: Proxy, running: Running) -> None:
    proxy.down = type(proxy.down)(limit=300)
    async with AsyncClient(*proxy.place) as client:
        with pytest.raises(ConnectionLost):
            await client.generate("Hello", max=500)
    proxy.down = type(proxy.down)(limit=300, then="stall")
    async with AsyncClient(*proxy.place, timeout=0.3) as client:
        with pytest.raises(Timeout):
            await client.generate("Hello", max=500)
    await running.figures_when(requests_running="0", connections_current="1")
