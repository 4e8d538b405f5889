"""The access line of one request: who asked for what, what came of it, how long it took."""

from __future__ import annotations

import asyncio

from coli_server.daemon import logs
from coli_server.daemon.scheduler import Ticket
from coli_server.daemon.sessions import Session
from coli_server.engine.api import Failed, Finished
from coli_server.errors import ColiError
from coli_server.protocol.commands import Command
from coli_server.telemetry import counters as ratios
from coli_server.telemetry.counters import Counters


class Record:
    """Collects the figures of a request. `key` is the request's number in every line of the log."""

    def __init__(self, key: int, id: str, command: Command, session: Session) -> None:
        self.key = key
        self._id = id
        self._command = command
        self._session = session
        self._began = asyncio.get_running_loop().time()
        self._outcome = "abandoned"
        self._figures: dict[str, logs.Field] = {}

    def refused(self, error: Exception) -> None:
        """The request ended with ERR."""
        self._outcome = error.code if isinstance(error, ColiError) else "INTERNAL"

    def ended(self, event: Finished | Failed) -> None:
        """The request ended with DONE, or with ERR after its ACK."""
        if isinstance(event, Finished):
            self._outcome = event.finish
            self._figures |= {"prompt_tokens": event.prompt_tokens, "tokens": event.tokens}
            if event.ttft_seconds is not None:
                self._figures["ttft_ms"] = event.ttft_seconds * 1000
        else:
            self._outcome = event.code
        self._figures |= _routing(event.counters)

    def write(self, ticket: Ticket | None, answer: str | None) -> None:
        """Write the line. `answer` is there when texts may be logged; then the prompt is logged, too."""
        now = asyncio.get_running_loop().time()
        texts = {} if answer is None else {"prompt": self._command.text, "answer": answer}
        waited = None
        if ticket is not None:
            waited = ((ticket.started or now) - ticket.submitted) * 1000
        logs.access(
            {
                "request": self.key,
                "session": self._session.name,
                "owner": self._session.owner,
                "verb": self._command.verb,
                "id": self._id,
                "outcome": self._outcome,
                "queue_ms": waited,
                "total_ms": (now - self._began) * 1000,
                **self._figures,
                **texts,
            }
        )


def _routing(counters: Counters) -> dict[str, logs.Field]:
    return {
        "lookups": counters.lookups,
        "hit_pct": ratios.hit_pct(counters),
        "swap_pct": ratios.swap_pct(counters),
        "load_bytes": counters.load_bytes,
    }
