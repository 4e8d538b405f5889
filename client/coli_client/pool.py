"""Several connections to one server, for programs that ask much at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from coli_client.aio import AsyncClient, AsyncGeneration
from coli_client.backoff import DEFAULT, PASSING, Backoff, at_least
from coli_client.commands import Options
from coli_client.defaults import HOST, PORT
from coli_client.results import Chunk, Result, Score, Stats, Version

__all__ = ["Pool"]

T = TypeVar("T")


class Pool:
    """Up to `size` connections, made when they are needed and used again; each does one thing at a time.

    What may be sent twice is: after a lost connection, a silent server or a refusal that passes (`Busy`,
    `Draining`), a command is sent again as `backoff` says, until the server has accepted it. What was
    accepted is never sent again. There is no dialogue here: `session` gives a connection for one.

    The other keywords are those of `AsyncClient`.
    """

    def __init__(
        self,
        host: str = HOST,
        port: int = PORT,
        *,
        size: int = 4,
        backoff: Backoff = DEFAULT,
        **options: Any,
    ) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        self._make: Callable[[], AsyncClient] = lambda: AsyncClient(host, port, **options)
        self._make()  # wrong arguments are an error here
        self._backoff = backoff
        self._room = asyncio.Semaphore(size)
        self._idle: list[AsyncClient] = []
        self._busy: set[AsyncClient] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all connections, and what runs on them."""
        clients, self._idle = [*self._idle, *self._busy], []
        for client in clients:
            await client.close()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """The whole continuation of a text, or of token ids."""
        async with self._accepted(prompt, options) as generation:
            return await generation

    async def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """The continuation as it comes. To leave the loop is to cancel, as soon as the iterator is closed."""
        async with self._accepted(prompt, options) as generation:
            async for chunk in generation:
                yield chunk

    async def score(
        self, context: str | Sequence[int], continuation: str | Sequence[int], **options: Unpack[Options]
    ) -> Score:
        """How likely `continuation` is behind `context`."""
        return await self._ask(lambda client: client.score(context, continuation, **options))

    async def ping(self) -> None:
        """Returns when the server has answered."""
        await self._ask(AsyncClient.ping)

    async def version(self) -> Version:
        """The server's version and protocol number."""
        return await self._ask(AsyncClient.version)

    async def stat(self, section: str | None = None, session: str | None = None) -> Stats:
        """The server's figures by name."""
        return await self._ask(lambda client: client.stat(section, session))

    @contextlib.asynccontextmanager
    async def session(self, id: str) -> AsyncGenerator[AsyncClient, None]:
        """A connection of its own, attached to the named session, for as long as the block lasts."""
        async with self._make().session(id) as client:
            yield client

    async def _ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        async def once() -> T:
            async with self._client() as client:
                return await call(client)

        return await self._repeat(once)

    @contextlib.asynccontextmanager
    async def _accepted(
        self, prompt: str | Sequence[int], options: Options
    ) -> AsyncGenerator[AsyncGeneration, None]:
        async with contextlib.AsyncExitStack() as stack:

            async def start() -> AsyncGeneration:
                async with contextlib.AsyncExitStack() as attempt:
                    client = await attempt.enter_async_context(self._client())
                    generation = await attempt.enter_async_context(client.generate(prompt, **options))
                    await generation.accepted()
                    stack.push_async_exit(attempt.pop_all())
                return generation

            yield await self._repeat(start)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for wait in self._backoff.waits():
            try:
                return await attempt()
            except PASSING as error:
                await asyncio.sleep(at_least(wait, error))
        return await attempt()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncGenerator[AsyncClient, None]:
        """A connected client that nobody else uses; the one that was used last first."""
        async with self._room:
            client = self._idle.pop() if self._idle else self._make()
            self._busy.add(client)
            try:
                await client.connect()
                yield client
            finally:
                self._busy.discard(client)
                self._idle.append(client)
