"""Encrypted connections, of both clients and of a bare socket."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coli_client import AccessDenied, AsyncClient, Client, ConnectionLost
from coli_server.daemon.tls import server_context
from coli_server.errors import ConfigurationError
from coli_server.settings import Settings

if TYPE_CHECKING:
    from tests.daemon.conftest import Serve

FOLDER = Path(__file__).parents[1] / "data" / "tls"
CERT, KEY = str(FOLDER / "cert.pem"), str(FOLDER / "key.pem")
TOKEN = "alice-" + "a" * 20


def context() -> ssl.SSLContext:
    made = server_context(Settings(tls_cert=CERT, tls_key=KEY))
    assert made is not None
    return made


async def test_both_clients_speak_through_tls_with_a_token(serve: Serve) -> None:
    running = await serve(tls=context(), tokens=f"alice={TOKEN}")
    host, port = running.place

    def blocking() -> str:
        with Client(host, port, cafile=CERT, token=TOKEN) as client:
            client.ping()
            return client.generate("Hello", max=3).wait().finish

    assert await asyncio.to_thread(blocking) == "length"
    async with AsyncClient(host, port, cafile=CERT, token=TOKEN) as client:
        assert (await client.generate("Hello", max=3)).tokens == 3
    with pytest.raises(AccessDenied):
        await AsyncClient(host, port, cafile=CERT, token="wrong").connect()
    with pytest.raises(AccessDenied):
        await asyncio.to_thread(Client(host, port, cafile=CERT, token="wrong").connect)


async def test_a_certificate_that_nobody_vouches_for_is_refused_by_the_clients(serve: Serve) -> None:
    running = await serve(tls=context())
    with pytest.raises(ConnectionLost, match="certificate"):
        await AsyncClient(*running.place, tls=True).connect()
    with pytest.raises(ConnectionLost, match="certificate"):
        await asyncio.to_thread(Client(*running.place, tls=True).connect)


async def test_plain_bytes_on_a_tls_port_leave_nothing_behind(serve: Serve) -> None:
    running = await serve(tls=context(), max_connections=2)
    for _ in range(5):
        reader, writer = await asyncio.open_connection(*running.place)
        writer.write(b"PING\n" * 20)
        assert b"PONG" not in await asyncio.wait_for(reader.read(), 20)
        writer.close()
    async with AsyncClient(*running.place, cafile=CERT) as client:
        assert (await client.stat())["connections_current"] == "1"


async def test_quit_and_an_error_that_closes_end_a_tls_connection(serve: Serve) -> None:
    running = await serve(tls=context())
    trusting = ssl.create_default_context(cafile=CERT)
    for lines, last in ((b"GEN max=2 Hello\nQUIT\n", b"OK bye"), (b"GEN bytes=x\n", b"ERR BAD_REQUEST")):
        reader, writer = await asyncio.open_connection(
            *running.place, ssl=trusting, server_hostname="localhost"
        )
        writer.write(lines)
        data = await asyncio.wait_for(reader.read(), 20)
        assert data.splitlines()[-1].startswith(last)
        writer.close()


async def test_a_client_that_vanishes_in_tls_is_noticed(serve: Serve) -> None:
    running = await serve(tls=context())
    trusting = ssl.create_default_context(cafile=CERT)
    reader, writer = await asyncio.open_connection(*running.place, ssl=trusting, server_hostname="localhost")
    writer.write(b"GEN max=60000 Hello\n")
    await reader.readline()
    writer.transport.abort()
    async with AsyncClient(*running.place, cafile=CERT) as client:
        for _ in range(1000):
            figures = await client.stat()
            if figures["requests_cancelled_total"] == "1":
                break
            await asyncio.sleep(0.02)
    assert (figures["requests_running"], figures["connections_current"]) == ("0", "1")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    for cert, key in ((str(tmp_path / "none.pem"), None), (str(tmp_path / "junk.pem"), None), (CERT, None)):
        with pytest.raises(ConfigurationError, match=f"COLI_TLS_CERT is '{cert}'"):
            server_context(Settings(tls_cert=cert, tls_key=key))
    with pytest.raises(ConfigurationError, match="COLI_TLS_CERT"):
        server_context(Settings(tls_key=KEY))
    assert server_context(Settings()) is None
