"""Sessions: who a connection speaks for. A dialogue, options of its own, requests, and counters.

A named session outlives its connections; an anonymous one (`~1`, `~2`) ends with its only connection.
Nothing here reads a socket or calls the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coli_server.engine.api import Finished
from coli_server.protocol.errors import ProtocolError
from coli_server.routing import RoutePolicy
from coli_server.telemetry.counters import Counters

if TYPE_CHECKING:
    from coli_server.daemon.generation import Generation

Message = dict[str, str]

# Sessions come free when people leave, which is seldom a matter of milliseconds.
_RETRY = {"retry_ms": 10_000}


@dataclass(slots=True, eq=False)
class Session:
    """One client's state. Only the event loop touches it.

    `key` is its name for the engine: unlike `name` it never comes back after the session has ended.
    `options` holds what SET changed; `requests` the unfinished GENs and CHATs by their ids; `outcomes` the
    half of the session's counters that the loop owns, `window` what they all were at the last `STAT reset`.
    `turn` lets CHATs of one session run in order. `owner` is whose token made it, where there are tokens.
    """

    name: str
    key: str
    last_use: float
    options: dict[str, Any] = field(default_factory=dict)
    dialogue: list[Message] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: dict[str, Generation] = field(default_factory=dict)
    outcomes: Counters = field(default_factory=Counters)
    window: Counters = field(default_factory=Counters)
    connections: int = 0
    owner: str | None = None
    last: tuple[Finished, RoutePolicy] | None = None

    @property
    def anonymous(self) -> bool:
        return self.name.startswith("~")

    @property
    def idle(self) -> bool:
        """Whether nobody is attached and nothing runs."""
        return not self.connections and not self.requests

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the unfinished requests."""
        return [generation.task for generation in self.requests.values()]

    def messages(self, system: str | None, text: str) -> list[Message]:
        """The dialogue so far and one more turn of the user, for the chat template."""
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, *self.dialogue, {"role": "user", "content": text}]

    def say(self, text: str, answer: str) -> None:
        """Keep a turn of the user and the model's answer, which may have been cut short."""
        self.dialogue += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


class Sessions:
    """All sessions of the daemon by name. Always: figures of all = `closed` + the sum over the living ones.

    At most `limit` named sessions are kept; the one idle for longest makes room for a new one. A named
    session ends `lifetime` seconds after its last use (0 = never). `on_end` hears the key of each
    session that ended, `on_forget` is called with each session that nobody can come back to.
    """

    def __init__(
        self,
        *,
        limit: int,
        lifetime: float,
        on_end: Callable[[str], None],
        on_forget: Callable[[Session], None] | None = None,
    ) -> None:
        self._limit = limit
        self._lifetime = lifetime
        self._on_end = on_end
        self._on_forget = on_forget
        self._living: dict[str, Session] = {}
        self._anonymous = 0
        self.total = 0
        self.evicted = 0
        self.expired = 0
        self.refused = 0
        self.closed = Counters()

    def __len__(self) -> int:
        return len(self._living)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._living.values())

    def get(self, name: str) -> Session | None:
        return self._living.get(name)

    def outcomes(self) -> Counters:
        """The loop's half of the global counters."""
        total = self.closed.copy()
        for session in self:
            total.add(session.outcomes)
        return total

    def open_anonymous(self, now: float, owner: str | None = None) -> Session:
        """A new session that belongs to one connection, and the connection attached to it."""
        self._anonymous += 1
        return self._open(f"~{self._anonymous}", now, owner)

    def attach(self, name: str, now: float, owner: str | None = None) -> tuple[Session, bool]:
        """The session called `name`, and whether it is new. Raises ProtocolError BUSY or FORBIDDEN."""
        known = self._living.get(name)
        if known is None:
            self._make_room()
            return self._open(name, now, owner), True
        if known.owner != owner:
            raise ProtocolError("FORBIDDEN", f"session {name} belongs to somebody else")
        known.connections += 1
        known.last_use = now
        return known, False

    def detach(self, session: Session, now: float) -> None:
        """One connection of `session` is over, or has moved to another session."""
        session.connections -= 1
        session.last_use = now
        self.settle(session)

    def settle(self, session: Session) -> None:
        """End an anonymous session once its connection is gone and its work is over."""
        if session.anonymous and session.idle and self._living.get(session.name) is session:
            self._end(session)

    def sweep(self, now: float) -> None:
        """End the named sessions that nobody has used for their lifetime."""
        if self._lifetime:
            for session in [one for one in self if one.idle and now - one.last_use >= self._lifetime]:
                self.expired += 1
                self._end(session)

    def restore(
        self, name: str, owner: str | None, last_use: float, dialogue: list[Message], options: dict[str, Any]
    ) -> bool:
        """Bring back a named session of an earlier process. False when there is no room for it."""
        if len(self._living) >= self._limit:
            return False
        session = self._open(name, last_use, owner)
        session.connections = 0
        session.dialogue, session.options = dialogue, options
        return True

    def _open(self, name: str, now: float, owner: str | None) -> Session:
        self.total += 1
        session = Session(name, f"{name}/{self.total}", last_use=now, connections=1, owner=owner)
        self._living[name] = session
        return session

    def _end(self, session: Session) -> None:
        del self._living[session.name]
        self.closed.add(session.outcomes)
        self._on_end(session.key)
        if self._on_forget is not None:
            self._on_forget(session)

    def _make_room(self) -> None:
        named = [session for session in self if not session.anonymous]
        if len(named) < self._limit:
            return
        oldest = min((one for one in named if one.idle), key=lambda one: one.last_use, default=None)
        if oldest is None:
            self.refused += 1
            raise ProtocolError("BUSY", f"all {self._limit} named sessions are in use", details=_RETRY)
        self.evicted += 1
        self._end(oldest)
