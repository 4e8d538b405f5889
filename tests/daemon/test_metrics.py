"""The metrics port of a real daemon, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coli_server.daemon import listening, metrics
from coli_server.daemon.health import Health
from coli_server.daemon.metrics import HEAD_BYTES, MOST_CONNECTIONS, MetricsPort
from coli_server.errors import ConfigurationError
from coli_server.settings import Address, Settings
from coli_server.telemetry.prometheus import MetricsSnapshot
from coli_server.telemetry.table import FIGURES, HISTOGRAMS

Serve = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: str


def parsed(data: bytes) -> Reply:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Reply(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body.decode())


def samples(text: str) -> dict[str, float]:
    """Every sample without labels but `le`, by its name; histogram buckets as `name{le}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = f"{{{sample.labels['le']}}}" if "le" in sample.labels else ""
            found[sample.name + label] = sample.value
    return found


@dataclass
class Port:
    place: tuple[str, int]

    async def send(self, data: bytes, *, end: bool = False) -> bytes:
        """What comes back for `data`, to the end of the connection."""
        reader, writer = await asyncio.open_connection(*self.place)
        writer.write(data)
        if end:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    async def get(self, path: str, method: str = "GET") -> Reply:
        return parsed(await self.send(f"{method} {path} HTTP/1.1\r\nHost: coli\r\n\r\n".encode()))

    async def samples(self) -> dict[str, float]:
        return samples((await self.get("/metrics")).body)


Open = Callable[[Health, Callable[[], MetricsSnapshot]], Awaitable[Port]]


@pytest.fixture
async def open_port() -> AsyncIterator[Open]:
    ports = []

    async def start(health: Health, snapshot: Callable[[], MetricsSnapshot]) -> Port:
        port = MetricsPort(health, snapshot)
        sockets = listening.bind_tcp(Address("127.0.0.1", 0))
        ports.append(port)
        await port.start(sockets)
        return Port(sockets[0].getsockname()[:2])

    yield start
    for port in ports:
        port.close()


@pytest.fixture
async def port(running: Any, open_port: Open) -> Port:
    return await open_port(running.daemon.health, running.daemon.metrics)


@pytest.fixture
async def bare(open_port: Open) -> Port:
    """A port whose pages nobody fills: for what HTTP itself must do."""
    return await open_port(Health(started=True), lambda: MetricsSnapshot({}, {}))


async def test_metrics_tell_what_stat_tells(client: Any, port: Port) -> None:
    client.send("GEN max=6 cache_route=1 The sea", "STAT")
    await client.until("DONE")
    figures = dict(line.split(" ", 2)[1:] for line in (await client.until("END"))[:-1])
    told = await port.samples()
    names = {figure.name: figure for figure in FIGURES if figure.kind == "counter"}
    moving = {"bytes_in_total", "bytes_out_total"}
    for name in names.keys() - moving:
        assert told[names[name].prometheus] == pytest.approx(float(figures[name]), abs=1e-3), name
    assert told["coli_lookups_total"] == told["coli_hits_lru_total"] + told["coli_misses_total"] > 0


async def test_every_figure_and_histogram_of_the_table_is_a_metric(serve: Serve, open_port: Open) -> None:
    running = await serve(ram=2**31)
    port = await open_port(running.daemon.health, running.daemon.metrics)
    told = await port.samples()
    expected = {f.prometheus for f in FIGURES if f.kind in ("counter", "gauge") and f.prometheus}
    assert expected | {f"{h.prometheus}_count" for h in HISTOGRAMS} | {"coli_info"} <= told.keys()


async def test_metrics_have_no_labels_but_those_of_the_daemon_itself(client: Any, port: Port) -> None:
    client.send("SESSION secret-name", "GEN id=secret-id max=2 secret prompt")
    await client.until("DONE")
    text = (await port.get("/metrics")).body
    assert "secret" not in text
    labelled = {
        f.name for f in text_string_to_metric_families(text) for s in f.samples if s.labels.keys() - {"le"}
    }
    assert labelled == {"coli_info"}


async def test_metrics_please_promtool_where_it_is_installed(port: Port) -> None:
    text = (await port.get("/metrics")).body
    assert samples(text)
    if promtool := shutil.which("promtool"):
        done = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_stat_reset_does_not_touch_metrics(client: Any, port: Port) -> None:
    client.send("GEN max=4 x", "STAT reset")
    await client.until("RESET")
    assert (await port.samples())["coli_generated_tokens_total"] == 4
    assert (await client.stat())["generated_tokens_total"] == "0"


async def test_histograms_count_what_happened(client: Any, port: Port) -> None:
    client.send("GEN max=5 x")
    await client.until("DONE")
    told = await port.samples()
    assert told["coli_time_to_first_token_seconds_count"] == 1
    assert told["coli_inter_token_latency_seconds_count"] == 4
    assert told["coli_request_seconds_count"] == told["coli_request_seconds_bucket{+Inf}"] == 1
    buckets = [value for name, value in told.items() if name.startswith("coli_expert_load_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert told["coli_expert_load_seconds_count"] == told["coli_loads_total"] > 0
    assert told["coli_expert_load_seconds_sum"] == pytest.approx(told["coli_load_seconds_total"])
    assert told["coli_expert_wait_seconds_sum"] == pytest.approx(told["coli_wait_seconds_total"])
    # Steps that found everything in memory did not wait.
    assert 0 < told["coli_expert_wait_seconds_count"] <= told["coli_loads_total"]


async def test_residents_of_each_layer_add_up(client: Any) -> None:
    client.send("GEN max=4 x")
    await client.until("DONE")
    figures = await client.stat("cache")
    residents = [int(word) for word in figures["layers_resident"].split(",")]
    assert max(residents) <= min(int(figures["cache_slots_per_layer"]), int(figures["model_experts"]))
    assert sum(residents) == int(figures["loads"]) - int(figures["evictions"])


async def test_a_daemon_that_loads_is_alive_and_not_ready(open_port: Open) -> None:
    port = await open_port(Health(), lambda: MetricsSnapshot({"ready": False}, {}))
    assert (await port.get("/healthz")).status == 200
    assert await port.get("/readyz") == replace(await port.get("/readyz"), status=503, body="starting\n")
    assert (await port.samples())["coli_ready"] == 0


async def test_a_daemon_that_drains_or_stands_still_is_alive_and_not_ready(running: Any, port: Port) -> None:
    health = running.daemon.health
    assert ((await port.get("/readyz")).status, (await port.samples())["coli_ready"]) == (200, 1)
    for state in ("stalled", "draining"):
        setattr(health, state, True)
        assert ((await port.get("/readyz")).status, (await port.samples())["coli_ready"]) == (503, 0)
        assert (await port.get("/healthz")).status == 200
        setattr(health, state, False)


async def test_a_daemon_whose_engine_failed_is_not_alive(open_port: Open) -> None:
    port = await open_port(Health(started=True, failed=True), lambda: MetricsSnapshot({}, {}))
    reply = await port.get("/healthz")
    assert (reply.status, reply.body) == (503, "the engine has failed\n")


async def test_a_fault_of_the_figures_is_an_answer(open_port: Open) -> None:
    port = await open_port(Health(started=True), lambda: MetricsSnapshot(None, {}))  # type: ignore[arg-type]
    assert (await port.get("/metrics")).status == 500
    assert (await port.get("/readyz")).status == 200


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /readyz HTTP/1.0\r\n\r\n", 200),
        (b"GET /readyz?a=b HTTP/1.1\r\n\r\n", 200),
        (b"GET /readyz HTTP/1.1\nHost: x\n\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../readyz HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"STAT\n\n", 400),
        (b"GET readyz HTTP/1.1\r\n\r\n", 400),
        (b"GET /readyz HTTP/2\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\n\n", 400),
        (b"GET /readyz HTTP/1.1\r\nA: " + b"a" * HEAD_BYTES, 431),
        (b"GET /readyz HTTP/1.1\r\n\r\n" + b"x" * 200_000, 431),
    ],
)
async def test_requests_good_and_bad(bare: Port, request_head: bytes, status: int) -> None:
    reply = parsed(await bare.send(request_head))
    assert reply.status == status
    assert (int(reply.headers["Content-Length"]), reply.headers["Connection"]) == (len(reply.body), "close")


async def test_head_tells_the_length_without_the_body(bare: Port) -> None:
    reply = await bare.get("/readyz", "HEAD")
    assert (reply.status, reply.body, reply.headers["Content-Length"]) == (200, "", "3")


async def test_a_request_may_come_byte_by_byte_and_be_followed_by_an_end(bare: Port) -> None:
    reader, writer = await asyncio.open_connection(*bare.place)
    for byte in b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n":
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write_eof()
    assert parsed(await asyncio.wait_for(reader.read(), 20)).status == 200
    writer.close()


async def test_half_a_request_gets_nothing(bare: Port) -> None:
    assert await bare.send(b"GET /metr", end=True) == b""


async def test_connections_that_say_nothing_do_not_lock_others_out_for_long(
    bare: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SECONDS", 0.2)
    idle = [await asyncio.open_connection(*bare.place) for _ in range(MOST_CONNECTIONS + 1)]
    for reader, writer in idle:
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
    assert (await bare.get("/readyz")).status == 200


def test_a_taken_port_is_refused_when_asked_for_and_done_without_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"COLI_METRICS_PORT is {number}: .*127.0.0.1:{number}"):
            metrics.bind(Settings(metrics_port=number))
        monkeypatch.setattr(metrics, "DEFAULT_PORT", number)
        assert metrics.bind(Settings()) == []
    assert metrics.bind(Settings(metrics_port=0)) == []
