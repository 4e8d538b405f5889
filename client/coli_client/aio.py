"""The asyncio client: several generations at once over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack, cast

from coli_client import commands, parser
from coli_client.commands import Command, Options, Request
from coli_client.defaults import (
    AT_ONCE,
    CONNECT_TIMEOUT,
    HOST,
    PORT,
    TIMEOUT,
    Address,
    IdSource,
    tls_context,
)
from coli_client.errors import ConnectionLost, Timeout
from coli_client.link import Link, Stream
from coli_client.results import Ack, Chunk, Info, Result, Score, Session, StatLine, Stats, Version

__all__ = ["AsyncClient", "AsyncGeneration", "Attaching"]

T = TypeVar("T")


class AsyncClient:
    """A connection to a Coli server for one event loop.

    `host` may be `unix:PATH`. Connect with `async with` or `await connect()`. Generations run side by side
    (the server has a limit a connection); other commands are answered in order. `timeout` is how many
    seconds the server may stay silent while it owes an answer; `None` waits for ever. After a `Timeout` or
    a `ConnectionLost` the connection is closed and stays so until `connect()`: a silent reconnect would go
    on in another session.

    `token` is shown to a server that asks for one. `tls` encrypts: `True` trusts what the system trusts,
    `cafile` names a PEM file to trust instead, an `SSLContext` is used as it is.

    When the task that awaits a generation is cancelled, so is the request on the server.
    """

    def __init__(
        self,
        host: str = HOST,
        port: int = PORT,
        *,
        timeout: float | None = TIMEOUT,
        connect_timeout: float | None = CONNECT_TIMEOUT,
        token: str | None = None,
        tls: bool | ssl.SSLContext = False,
        cafile: str | None = None,
    ) -> None:
        self._address = Address(host, port)
        self._auth = None if token is None else commands.auth(token)
        self._tls = tls_context(tls, cafile)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._ids = IdSource()

    async def connect(self) -> None:
        """Connects; does nothing when connected. Raises `ConnectionLost`, `Timeout` or `AccessDenied`."""
        try:
            async with self._connecting, asyncio.timeout(self._connect_timeout):
                if self._link is None or self._link.error is not None:
                    self._link = await self._open()
        except TimeoutError:
            raise Timeout(f"no connection to {self._address} within {self._connect_timeout} s") from None
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {self._address}: {error}") from error

    async def _open(self) -> Link:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path is not None:
            _, link = await loop.create_unix_connection(lambda: Link(self._timeout), address.path)
        else:
            _, link = await loop.create_connection(
                lambda: Link(self._timeout), address.host, address.port, ssl=self._tls
            )
        if self._auth is not None:
            try:
                await link.call(self._auth)
            except BaseException:
                link.close(ConnectionLost("the server did not take the token"))
                raise
        return link

    async def close(self) -> None:
        """Ends the connection; what runs on it is cancelled by the server. Safe to call twice."""
        if self._link is not None:
            self._link.close(ConnectionLost("the client was closed"))
            await asyncio.shield(self._link.gone)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncGeneration:
        """Continues a text, or a sequence of token ids. Sends at once: do not await, to run several.

        Raises `TypeError` or `ValueError` for wrong arguments before anything is sent. The server's refusal
        (`Busy`, `ContextExceeded`, ...) is raised where the generation is awaited or iterated.
        """
        return self._start(commands.generate(prompt, self._ids.next(), options))

    def chat(self, text: str, **options: Unpack[Options]) -> AsyncGeneration:
        """One user turn of the session's dialogue, through the model's chat template."""
        return self._start(commands.chat(text, self._ids.next(), options))

    async def score(
        self, context: str | Sequence[int], continuation: str | Sequence[int], **options: Unpack[Options]
    ) -> Score:
        """How likely `continuation` is behind `context`: two texts, or token ids of both.

        By stock routing, unless a routing option says otherwise.
        """
        return parser.score(
            await self._start(commands.score(context, continuation, self._ids.next(), options))
        )

    async def score_all(
        self,
        pairs: Iterable[tuple[str | Sequence[int], str | Sequence[int]]],
        *,
        at_once: int = AT_ONCE,
        **options: Unpack[Options],
    ) -> list[Score]:
        """The score of each (context, continuation), in order; `at_once` of them run together.

        The first error cancels the others and is raised.
        """
        gate = asyncio.Semaphore(at_once)

        async def run(request: Request) -> Score:
            async with gate:
                return parser.score(await self._start(request))

        tasks = [asyncio.create_task(run(each)) for each in commands.scores(pairs, self._ids.next, options)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def ping(self) -> None:
        """Returns when the server has answered."""
        await self._call(commands.ping())

    async def version(self) -> Version:
        """The server's version and protocol number."""
        return await self._call(commands.version())

    async def help(self, verb: str | None = None) -> str:
        """The server's own description of its commands, or of one of them."""
        return await self._call(commands.help(verb))

    async def stat(self, section: str | None = None, session: str | None = None) -> Stats:
        """Figures by name; `section="session"` gives those of this session, or of `session`."""
        return await self._call(commands.stat(section, session))

    async def stat_line(self) -> StatLine:
        """The figures of the session's last request."""
        return await self._call(commands.stat_line())

    async def stat_reset(self) -> None:
        """Starts a new window of the figures that `stat` shows (for administrators)."""
        await self._call(commands.stat_reset())

    def session(self, id: str) -> Attaching:
        """`await` it: attaches this connection to the named session, for all later commands.

        `async with` it: gives a client with a connection of its own in that session, closed at the end.
        """
        return Attaching(self, commands.session(id))

    async def set(self, option: str, value: bool | float | str) -> None:
        """Changes an option of the session, for example `set("temp", 0.7)`."""
        await self._call(commands.set_option(option, value))

    async def cancel(self, id: str) -> None:
        """Cancels the request `id` of this session; `NotFound` when it is not running."""
        await self._call(commands.cancel(id))

    async def reset(self) -> None:
        """Forgets the session's dialogue; counters stay. Waits for the session's running requests,
        and later commands of this connection, a cancellation too, wait for it."""
        await self._call(commands.reset())

    def _another(self) -> AsyncClient:
        """A client of the same server, not connected yet."""
        other = copy.copy(self)
        other._link, other._connecting, other._ids = None, asyncio.Lock(), IdSource()
        return other

    async def _call(self, command: Command[T]) -> T:
        return cast(T, await self._connected().call(command))

    def _start(self, request: Request) -> AsyncGeneration:
        link = self._connected()
        return AsyncGeneration(link, link.open(request))

    def _connected(self) -> Link:
        if self._link is None:
            raise ConnectionLost("not connected: use 'async with' or await connect()")
        return self._link


class Attaching:
    """What `AsyncClient.session` gives: to be awaited, or entered with `async with`."""

    def __init__(self, client: AsyncClient, command: Command[Session]) -> None:
        self._client = client
        self._command = command
        self._own: AsyncClient | None = None

    def __await__(self) -> Generator[object, None, Session]:
        return self._client._call(self._command).__await__()

    async def __aenter__(self) -> AsyncClient:
        own = self._client._another()
        await own.connect()
        try:
            await own._call(self._command)
        except BaseException:
            await own.close()
            raise
        self._own = own
        return own

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._own is not None:
            await self._own.close()


class AsyncGeneration:
    """A generation that is under way. `await` it for its `Result`, or iterate it for chunks as they come.

    Leaving the iteration before the end, cancelling the task that awaits it, leaving an `async with` block
    around it, or dropping it, cancels the request on the server; the connection goes on. One task reads it.
    """

    def __init__(self, link: Link, stream: Stream) -> None:
        self._link = link
        self._stream = stream
        self.id = stream.request.id

    def __await__(self) -> Generator[object, None, Result]:
        return self.wait().__await__()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(self._read()) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    yield event

    def events(self) -> AsyncIterator[Chunk | Info]:
        """As iterating, with the server's news (queue place, prompt progress) among the chunks."""
        return self._read()

    async def wait(self) -> Result:
        """Reads to the end and returns the result, with the whole text in it."""
        async with contextlib.aclosing(self._read()) as events:
            async for _ in events:
                pass
        return self.result

    async def accepted(self) -> Ack:
        """Returns when the server has accepted the request; raises its refusal."""
        transcript = self._stream.transcript
        while transcript.ack is None:
            if transcript.ended:
                _ = transcript.result
                raise ConnectionLost("the request was cancelled before it was sent")
            await self._link.news(self._stream)
        return transcript.ack

    async def cancel(self) -> Result:
        """Cancels on the server and waits for the end; does nothing after the end.

        The result says `finish="cancelled"`, unless the generation ended before the server was told.
        """
        self._link.abandon(self._stream)
        while not self._stream.ended:
            await self._link.news(self._stream)
        return self.result

    @property
    def text(self) -> str:
        """The text that came so far; the whole after the end."""
        return self._stream.transcript.text

    @property
    def ended(self) -> bool:
        """Whether the generation has ended, well or not."""
        return self._stream.ended

    @property
    def result(self) -> Result:
        """The result. Raises the error that ended the generation; `RuntimeError` before the end."""
        return self._stream.transcript.result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._link.abandon(self._stream)

    def __del__(self) -> None:
        # The last reference may go in any thread.
        if not self._stream.ended and not self._link.loop.is_closed():
            self._link.loop.call_soon_threadsafe(self._link.abandon, self._stream)

    async def _read(self) -> AsyncGenerator[Chunk | Info, None]:
        stream = self._stream
        try:
            while True:
                while stream.unread:
                    yield self._link.read(stream)
                if stream.ended:
                    break
                await self._link.news(stream)
            _ = self.result  # raises the error if it ended with one
        finally:
            self._link.abandon(stream)
