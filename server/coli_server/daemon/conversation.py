"""What one client says and is answered: a method per verb.

Nothing here knows about sockets: commands come in as values, reply lines go out through `send`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count

from coli_server import __version__
from coli_server.daemon import answers
from coli_server.daemon.core import Core
from coli_server.daemon.figures import rss_bytes
from coli_server.daemon.generation import Generation, Scoring
from coli_server.daemon.options import layered
from coli_server.daemon.sessions import Session
from coli_server.daemon.tokens import Identity
from coli_server.engine.api import SYSTEM
from coli_server.errors import ColiError
from coli_server.protocol import replies
from coli_server.protocol.commands import Command
from coli_server.protocol.errors import ProtocolError

log = logging.getLogger(__name__)


# What a client may ask before it has shown a token.
_OPEN_VERBS = frozenset({"AUTH", "PING", "VERSION", "HELP", "QUIT"})
# After so many refusals a client without a token is sent away: it guesses.
MOST_REFUSALS = 3


class Conversation:
    """The state of one connection above bytes: its session, its ids, its unfinished requests.

    `local` says that the client runs on this machine. `over` becomes true when
    nothing more is to be answered.
    """

    def __init__(self, core: Core, send: Callable[[bytes], None], *, local: bool) -> None:
        self._core = core
        self._send = send
        self._local = local
        self._identity: Identity | None = None
        self._refused = 0
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._ids = count(1)
        self._requests: dict[asyncio.Task[None], Generation] = {}
        self.over = False
        self._verbs: dict[str, Callable[[Command], Awaitable[None]]] = {
            "PING": self._ping,
            "VERSION": self._version,
            "HELP": self._help,
            "AUTH": self._authenticate,
            "STAT": self._stat,
            "SESSION": self._attach,
            "SET": self._set,
            "GEN": self._generate,
            "CHAT": self._generate,
            "SCORE": self._generate,
            "CANCEL": self._cancel,
            "RESET": self._reset,
            "QUIT": self._quit,
        }

    @property
    def admitted(self) -> bool:
        """Whether the client has shown a token that counts now, or needs none."""
        return self._core.tokens.valid(self._identity)

    @property
    def revoked(self) -> bool:
        """Whether the client had a token that counts no more."""
        return self._identity is not None and not self.admitted

    @property
    def _trusted(self) -> bool:
        """Whether the client may see what other sessions do."""
        if self._core.tokens:
            return self._identity is not None and self._identity.admin
        return self._local

    @property
    def _owner(self) -> str | None:
        return None if self._identity is None else self._identity.owner

    def _stranger(self, message: str) -> ProtocolError:
        """The refusal of a client without a token that counts; the last one closes."""
        self._refused += 1
        self._core.meters.auth_failures_total += 1
        return ProtocolError("AUTH", message, close=self._refused >= MOST_REFUSALS)

    @property
    def busy(self) -> bool:
        """Whether requests of this connection are unfinished."""
        return bool(self._requests)

    async def answer(self, command: Command) -> None:
        """Answer a command completely; one that has an id may run on beside the next ones."""
        try:
            if not self.admitted and command.verb not in _OPEN_VERBS:
                raise self._stranger("say AUTH and a token first")
            await self._verbs[command.verb](command)
        except Exception as error:
            if not isinstance(error, ColiError):
                log.exception("%s failed", command.verb)
            self._send(answers.refusal(error, command.id))
            self.over = self.over or (isinstance(error, ProtocolError) and error.close)

    def tell(self) -> None:
        """Send how far each accepted request is."""
        for generation in self._requests.values():
            generation.tell()

    def cancel(self) -> None:
        """End whatever runs on this connection."""
        for generation in self._requests.values():
            generation.cancel()

    async def finished(self) -> None:
        """Wait until the last lines of all requests of this connection have been sent."""
        if self._requests:
            await asyncio.wait(self._requests)

    def leave(self) -> None:
        """The connection is over: let go of the session."""
        if self._session is not None:
            session, self._session = self._session, None
            self._core.sessions.detach(session, self._loop.time())

    @property
    def _here(self) -> Session:
        """This connection's session; an anonymous one from the first command that needs one."""
        if self._session is None:
            self._session = self._core.sessions.open_anonymous(self._loop.time(), self._owner)
        return self._session

    async def _ping(self, _: Command) -> None:
        self._send(replies.PONG)

    async def _version(self, _: Command) -> None:
        self._send(replies.version(__version__))

    async def _help(self, command: Command) -> None:
        self._send(replies.help_text(*command.arguments))

    async def _authenticate(self, command: Command) -> None:
        """Take a token. A session that was begun as somebody else stays behind."""
        if self._core.tokens:
            identity = self._core.tokens.identify(command.arguments[0])
            if identity is None:
                raise self._stranger("this token is not known")
            if identity.owner != self._owner:
                self.leave()
            self._identity = identity
        self._send(replies.OK)

    async def _attach(self, command: Command) -> None:
        session, new = self._core.sessions.attach(command.arguments[0], self._loop.time(), self._owner)
        self.leave()
        self._session = session
        self._send(replies.session(session.name, new=new))

    async def _set(self, command: Command) -> None:
        session = self._here
        session.options.update(command.options)
        await self._core.dialogues.save(session)
        self._send(replies.OK)

    async def _generate(self, command: Command) -> None:
        session, core = self._here, self._core
        id = self._id_of(command, session)
        most = core.settings.requests_per_connection
        if len(self._requests) >= most:
            core.meters.busy_connection_total += 1
            raise core.scheduler.busy(f"{most} requests of this connection are unfinished")
        most = core.settings.requests_per_session
        if len(session.requests) >= most:
            core.meters.busy_session_total += 1
            raise core.scheduler.busy(f"{most} requests of this session are unfinished")
        kind, defaults = Generation, core.options
        if command.verb == "SCORE":  # what a text is worth does not depend on how the daemon is set
            kind, defaults = Scoring, {**core.options, "cache_route": False}
        generation = kind(
            id,
            command,
            session,
            layered(command.options, session.options, defaults),
            core=core,
            send=self._send,
        )
        self._requests[generation.task] = generation
        generation.task.add_done_callback(lambda task: self._forget(task, session))
        await (generation.settled.wait() if command.id else asyncio.wait({generation.task}))

    def _id_of(self, command: Command, session: Session) -> str:
        if command.id is None:
            return next(id for id in map(str, self._ids) if id not in session.requests)
        if command.id in session.requests:
            raise ProtocolError("DUPLICATE_ID", f"request {command.id} of this session is not over")
        return command.id

    def _forget(self, task: asyncio.Task[None], session: Session) -> None:
        del self._requests[task]
        session.last_use = self._loop.time()
        self._core.sessions.settle(session)

    async def _cancel(self, command: Command) -> None:
        id = command.arguments[0]
        generation = self._here.requests.get(id)
        if generation is None:
            raise ProtocolError("NOT_FOUND", f"no request {id} of this session is running")
        generation.cancel()
        self._send(replies.OK)

    async def _reset(self, _: Command) -> None:
        session = self._here
        earlier = session.tasks()
        # Having the turn means that the CHATs before this are over and that later ones wait.
        async with session.turn:
            if earlier:
                await asyncio.wait(earlier)
            session.dialogue.clear()
            self._core.scheduler.forget(session)
            await self._core.dialogues.save(session)
        self._send(replies.OK)

    async def _quit(self, _: Command) -> None:
        self.cancel()
        await self.finished()
        self._send(replies.BYE)
        self.over = True

    async def _stat(self, command: Command) -> None:
        section, *names = command.arguments or ("all",)
        figures = self._core.figures
        match section:
            case "session" if names == [SYSTEM]:
                self._need_trust("the figures of pins and prefetch")
                pairs = figures.system()
            case "session":
                pairs = figures.session(self._session_called(*names))
            case "sessions":
                self._need_trust("other sessions' figures")
                pairs = figures.sessions()
            case "settings":
                pairs = figures.settings(paths=self._trusted)
            case "line":
                event, policy = self._here.last or (None, None)
                self._send(answers.stat_line(event, policy, rss_bytes=rss_bytes()))
                return
            case "reset":
                self._need_trust("STAT reset")
                figures.reset()
                self._send(replies.RESET)
                return
            case _:
                pairs = figures.everything(section)
        self._send(replies.stat(pairs))

    def _session_called(self, name: str | None = None) -> Session:
        if name is None or (self._session is not None and name == self._session.name):
            return self._here
        self._need_trust("another session's figures")
        session = self._core.sessions.get(name)
        if session is None:
            raise ProtocolError("NOT_FOUND", f"there is no session {name}")
        return session

    def _need_trust(self, what: str) -> None:
        if not self._trusted:
            whom = "the token of admin" if self._core.tokens else "clients on this machine"
            raise ProtocolError("FORBIDDEN", f"{what}: for {whom} only")
