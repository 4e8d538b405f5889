"""What is known of one generation so far, fed by its events. Shared by both clients; no I/O."""

from __future__ import annotations

from dataclasses import replace

from coli_client.connection import Closed, Done, Event, Failed
from coli_client.errors import ColiError
from coli_client.results import Ack, Chunk, Info, Result


class Transcript:
    """Collects text and figures; ends with a result or an error, once."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.ack: Ack | None = None
        self.error: ColiError | None = None
        self._result: Result | None = None
        self._pieces: list[str] = []

    @property
    def ended(self) -> bool:
        return self._result is not None or self.error is not None

    @property
    def text(self) -> str:
        """All text that came so far."""
        return "".join(self._pieces)

    @property
    def result(self) -> Result:
        """The result; raises the generation's error, or `RuntimeError` when it has not ended."""
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise RuntimeError(f"generation {self.id} has not ended: its result is not known yet")
        return self._result

    def take(self, event: Event) -> Info | Chunk | None:
        """Records an event of this generation; gives it back if it is one for the caller to see."""
        match event:
            case Chunk():
                self._pieces.append(event.text)
                return event
            case Info():
                return event
            case Ack():
                self.ack = event
            case Done():
                session = self.ack.session if self.ack else ""
                self._result = replace(event.result, text=self.text, session=session)
            case Failed() | Closed():
                self.error = event.error
        return None

    def withdraw(self) -> None:
        """Ends a generation that was never sent, as cancelled."""
        self._result = Result(self.id, "", "cancelled", tokens=0, prompt_tokens=0)
