"""The blocking client: one connection, one thing at a time."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from coli_client import commands, parser
from coli_client.commands import Command, Options, Request
from coli_client.connection import Closed, Connection, Done, Event, Failed, Reply
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
from coli_client.errors import ClientInUse, ColiError, ConnectionLost, Timeout
from coli_client.results import Ack, Chunk, Info, Result, Score, Session, StatLine, Stats, Version
from coli_client.transcript import Transcript

__all__ = ["Client", "Generation"]

_READ_SIZE = 65_536

T = TypeVar("T")


class Client:
    """A connection to a Coli server for one thread.

    `host` may be `unix:PATH`. Connects at the first command, at `connect()` or on entering a `with` block.
    `timeout` is how many seconds the server may stay silent while it owes an answer (it sends news of a
    waiting request every two seconds); `None` waits for ever. After a `Timeout` or a `ConnectionLost` the
    connection is closed and stays so until `connect()`: a silent reconnect would go on in another session.

    `token` is shown to a server that asks for one. `tls` encrypts: `True` trusts what the system trusts,
    `cafile` names a PEM file to trust instead, an `SSLContext` is used as it is.

    While a generation runs, any other command raises `ClientInUse`. A generation that nobody holds any more
    is cancelled first.
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
        self._channel: _Channel | None = None
        self._lock = threading.Lock()
        self._current: weakref.ref[Generation] | None = None
        self._ids = IdSource()

    def connect(self) -> None:
        """Connects now; does nothing when connected. Raises `ConnectionLost`, `Timeout` or `AccessDenied`."""
        if self._channel is None or self._channel.error is not None:
            channel = _Channel.open(self._address, self._timeout, self._connect_timeout, self._tls)
            if self._auth is not None:
                try:
                    channel.call(self._auth)
                except BaseException:
                    channel.close(ConnectionLost("the server did not take the token"))
                    raise
            self._channel = channel

    def close(self) -> None:
        """Ends the connection; what runs on it is cancelled by the server. Safe to call twice."""
        if self._channel is not None:
            self._channel.close(ConnectionLost("the client was closed"))

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation:
        """Continues a text, or a sequence of token ids. Returns when the server has accepted it.

        Raises `TypeError` or `ValueError` for wrong arguments before anything is sent, and the server's
        refusal (`Busy`, `ContextExceeded`, ...) as a `ServerError`.
        """
        return self._start(commands.generate(prompt, self._ids.next(), options))

    def chat(self, text: str, **options: Unpack[Options]) -> Generation:
        """One user turn of the session's dialogue, through the model's chat template."""
        return self._start(commands.chat(text, self._ids.next(), options))

    def score(
        self, context: str | Sequence[int], continuation: str | Sequence[int], **options: Unpack[Options]
    ) -> Score:
        """How likely `continuation` is behind `context`: two texts, or token ids of both.

        By stock routing, unless a routing option says otherwise.
        """
        request = commands.score(context, continuation, self._ids.next(), options)
        return parser.score(self._start(request).wait())

    def score_all(
        self,
        pairs: Iterable[tuple[str | Sequence[int], str | Sequence[int]]],
        *,
        at_once: int = AT_ONCE,
        **options: Unpack[Options],
    ) -> list[Score]:
        """The score of each (context, continuation), in order; `at_once` of them run together.

        After the first error no more are sent; it is raised when those that run have ended.
        """
        requests = commands.scores(pairs, self._ids.next, options)
        with self._free_channel() as channel:
            results = channel.run_all(requests, at_once)
        return [parser.score(result) for result in results]

    def ping(self) -> None:
        """Returns when the server has answered."""
        return self._call(commands.ping())

    def version(self) -> Version:
        """The server's version and protocol number."""
        return self._call(commands.version())

    def help(self, verb: str | None = None) -> str:
        """The server's own description of its commands, or of one of them."""
        return self._call(commands.help(verb))

    def stat(self, section: str | None = None, session: str | None = None) -> Stats:
        """Figures by name; `section="session"` gives those of this session, or of `session`."""
        return self._call(commands.stat(section, session))

    def stat_line(self) -> StatLine:
        """The figures of the session's last request."""
        return self._call(commands.stat_line())

    def stat_reset(self) -> None:
        """Starts a new window of the figures that `stat` shows (for administrators)."""
        return self._call(commands.stat_reset())

    def session(self, id: str) -> Session:
        """Attaches this connection to the named session, for all later commands."""
        return self._call(commands.session(id))

    def set(self, option: str, value: bool | float | str) -> None:
        """Changes an option of the session, for example `set("temp", 0.7)`."""
        return self._call(commands.set_option(option, value))

    def cancel(self, id: str) -> None:
        """Cancels the request `id` of this session; `NotFound` when it is not running."""
        current = self._current() if self._current is not None else None
        if current is not None and current.id == id and not current.ended:
            current.cancel()
        else:
            self._call(commands.cancel(id))

    def reset(self) -> None:
        """Forgets the session's dialogue; counters stay. Waits for the session's running requests."""
        return self._call(commands.reset())

    def _call(self, command: Command[T]) -> T:
        with self._free_channel() as channel:
            return channel.call(command)

    def _start(self, request: Request) -> Generation:
        with self._free_channel() as channel:
            generation = Generation(self, channel, channel.start(request))
            self._current = weakref.ref(generation)
            return generation

    @contextlib.contextmanager
    def _free_channel(self) -> Iterator[_Channel]:
        """The connection, for a command that may be sent on it now."""
        with self._exclusive():
            if self._channel is None:
                self.connect()
            channel = cast(_Channel, self._channel)
            if channel.running is not None:
                if self._current is not None and self._current() is not None:
                    raise ClientInUse(f"generation {channel.running} is running on this client")
                channel.discard(channel.running)
            yield channel

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ClientInUse("another thread is using this client")
        try:
            yield
        finally:
            self._lock.release()


class Generation:
    """A running generation. Iterate it for its chunks as they come, or `wait()` for the whole.

    Leaving the iteration before the end, by `break` or by an exception, cancels the request on the server and
    keeps the connection. So does the end of a `with` block around it.
    """

    def __init__(self, client: Client, channel: _Channel, ack: Ack) -> None:
        self._client = client
        self._channel = channel
        self._transcript = Transcript(ack.id)
        self._transcript.take(ack)
        self.id = ack.id
        self.ack = ack

    def __iter__(self) -> Iterator[Chunk]:
        return (event for event in self.events() if isinstance(event, Chunk))

    def events(self) -> Iterator[Chunk | Info]:
        """As iterating, with the server's news (queue place, prompt progress) among the chunks."""
        try:
            while not self._transcript.ended:
                event = self._transcript.take(self._next())
                if event is not None:
                    yield event
            _ = self._transcript.result  # raises the error if it ended with one
        finally:
            if not self._transcript.ended:
                with contextlib.suppress(ColiError):
                    self.cancel()

    def wait(self) -> Result:
        """Reads to the end and returns the result, with the whole text in it."""
        for _ in self.events():
            pass
        return self.result

    def cancel(self) -> Result:
        """Cancels on the server and reads what was still under way; does nothing after the end.

        The result says `finish="cancelled"`, unless the generation ended before the server was told.
        """
        if not self._transcript.ended:
            with self._client._exclusive():
                try:
                    events = self._channel.discard(self.id)
                except ColiError as error:
                    events = [Closed(error)]
            for event in events:
                self._transcript.take(event)
        return self.result

    @property
    def ended(self) -> bool:
        """Whether the last event was read."""
        return self._transcript.ended

    @property
    def text(self) -> str:
        """The text that came so far; the whole after the end."""
        return self._transcript.text

    @property
    def result(self) -> Result:
        """The result. Raises the error that ended the generation; `RuntimeError` before the end."""
        return self._transcript.result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._transcript.ended:
            self.cancel()

    def _next(self) -> Event:
        with self._client._exclusive():
            try:
                return self._channel.next()
            except ColiError as error:
                return Closed(error)


class _Channel:
    """One socket and the protocol's state on it, in step or closed: never anything else."""

    def __init__(self, sock: socket.socket, timeout: float | None) -> None:
        self._socket = sock
        self._timeout = timeout
        self._core = Connection()
        self._events: deque[Event] = deque()
        self._sent_whole = True
        self.running: str | None = None

    @classmethod
    def open(
        cls,
        address: Address,
        timeout: float | None,
        connect_timeout: float | None,
        tls: ssl.SSLContext | None,
    ) -> _Channel:
        try:
            sock = _connected(address, connect_timeout, tls)
        except TimeoutError:
            raise Timeout(f"no connection to {address} within {connect_timeout} s") from None
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {address}: {error}") from error
        sock.settimeout(timeout)
        return cls(sock, timeout)

    @property
    def error(self) -> ColiError | None:
        return self._core.error

    def call(self, command: Command[T]) -> T:
        """Sends and waits for the whole answer."""
        try:
            self._send(command)
            event = self.next()
        except BaseException as error:
            self._interrupted(error)
            raise
        if isinstance(event, Failed):
            raise event.error
        return cast(T, cast(Reply, event).value)

    def start(self, request: Request) -> Ack:
        """Sends a generation and waits until it is accepted. An interrupted wait cancels it."""
        try:
            self._send(request)
            event = self.next()
        except BaseException:
            with contextlib.suppress(ColiError):
                self.discard(request.id)
            raise
        if isinstance(event, Failed):
            raise event.error
        self.running = request.id
        return cast(Ack, event)

    def run_all(self, requests: Sequence[Request], at_once: int) -> list[Result]:
        """Sends requests, at most `at_once` unfinished ones at a time; their results in order."""
        results: dict[str, Result] = {}
        errors: list[ColiError] = []
        unsent, unfinished = deque(requests), 0
        try:
            while unfinished or (unsent and not errors):
                if unsent and not errors and self._core.idle and unfinished < at_once:
                    self._send(unsent.popleft())
                    unfinished += 1
                event = self.next()
                if isinstance(event, Done):
                    results[event.id] = event.result
                elif isinstance(event, Failed):
                    errors.append(event.error)
                unfinished -= isinstance(event, Done | Failed)
        except BaseException as error:
            self._interrupted(error)
            raise
        if errors:
            raise errors[0]
        return [results[request.id] for request in requests]

    def next(self) -> Event:
        """The next event; raises the reason once the connection is closed."""
        while not self._events:
            self._receive()
        event = self._events.popleft()
        if isinstance(event, Closed):
            self.close(event.error)
            raise event.error
        if isinstance(event, Done | Failed) and event.id == self.running:
            self.running = None
        return event

    def discard(self, id: str) -> list[Event]:
        """Cancels `id` and reads its remaining events; after that nothing of it can come any more."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        events: list[Event] = []
        told = False
        try:
            while self._core.owing or self._events:
                if self._core.idle and not told:
                    self._send(commands.cancel(id))
                    told = True
                event = self.next()
                if not isinstance(event, Reply) and not (isinstance(event, Failed) and event.id is None):
                    events.append(event)
                if deadline is not None and time.monotonic() > deadline:
                    raise Timeout(f"request {id} did not end within {self._timeout} s of its cancellation")
        except BaseException as error:
            self._interrupted(error)
            raise
        return events

    def close(self, error: ColiError) -> None:
        self._core.close(error)
        self.running = None
        if self._sent_whole:  # or QUIT would be the rest of another command
            with contextlib.suppress(OSError):
                # The server cancels what runs here now, instead of when its next write fails.
                self._socket.setblocking(False)
                self._socket.send(commands.QUIT)
        self._socket.close()

    def _interrupted(self, error: BaseException) -> None:
        """Closes: the rest of an answer that nobody waits for must not meet the next command."""
        self.close(error if isinstance(error, ColiError) else ConnectionLost("a command was interrupted"))

    def _send(self, command: Command[Any] | Request) -> None:
        try:
            data = self._core.send(command)
            try:
                self._sent_whole = False
                self._socket.sendall(data)
                self._sent_whole = True
            except TimeoutError:
                raise Timeout(f"the server took no data for {self._timeout} s") from None
            except OSError:
                # The reading side knows why: the server may have said so before it closed.
                pass
        except BaseException as error:
            self._interrupted(error)  # half a command may be under way
            raise

    def _receive(self) -> None:
        if self._core.error is not None:
            raise self._core.closed()
        try:
            data = self._socket.recv(_READ_SIZE)
        except TimeoutError:
            self._fail(Timeout(f"the server was silent for {self._timeout} s while it owed an answer"))
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error}"))
        else:
            try:
                self._events.extend(self._core.receive(data) if data else self._core.end())
            except BaseException as interruption:
                self._interrupted(interruption)  # some of the data may be lost
                raise

    def _fail(self, error: ColiError) -> None:
        self._events.extend(self._core.close(error))


def _connected(address: Address, timeout: float | None, tls: ssl.SSLContext | None) -> socket.socket:
    if address.path is None:
        sock = socket.create_connection((address.host, address.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return sock
        try:
            return tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(address.path)
    except BaseException:
        sock.close()
        raise
    return sock
