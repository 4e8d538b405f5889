"""One GEN, CHAT or SCORE from its command to its DONE."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from coli_server.daemon import answers
from coli_server.daemon.core import Core
from coli_server.daemon.options import policy_of, sampling_of
from coli_server.daemon.record import Record
from coli_server.daemon.scheduler import EarlyEnd, Ticket
from coli_server.daemon.sessions import Session
from coli_server.engine.api import Failed, Finished, GenerationRequest, Kind, TextChunk
from coli_server.errors import ColiError
from coli_server.protocol import replies
from coli_server.protocol.commands import Command
from coli_server.telemetry.counters import Counters

log = logging.getLogger(__name__)


class Generation:
    """One GEN or CHAT of a session. A refusal comes before ACK; the last line always comes.

    `task` answers it, from now on, and ends after the last line. `settled` is set as soon as the
    connection may go on to its next command: the request was accepted or refused, or it waits for the
    CHAT before it. `send` takes reply lines and may lead nowhere.
    """

    def __init__(
        self,
        id: str,
        command: Command,
        session: Session,
        options: Mapping[str, Any],
        *,
        core: Core,
        send: Callable[[bytes], None],
    ) -> None:
        self.id = id
        self.settled = asyncio.Event()
        self._kind: Kind = "chat" if command.verb == "CHAT" else "gen"
        self._command = command
        self._session = session
        self._options = options
        self._policy = policy_of(options)
        self._deadline = _deadline(options["deadline_ms"])
        self._core = core
        self._scheduler = core.scheduler
        self._prompts = core.prompts
        self._record = Record(core.scheduler.next_key(), id, command, session)
        self._send = send
        self._ticket: Ticket | None = None
        self._begun = False
        self._cancelled = False
        session.requests[id] = self
        self.task = asyncio.create_task(self._run(), name=f"{session.name}/{id}")
        self._answer: list[str] = []

    def cancel(self) -> None:
        """End early. The last line still comes, with `finish=cancelled`."""
        self._cancelled = True
        if self._ticket is not None:
            self._scheduler.cancel(self._ticket)
        elif self._begun:  # a task that is cancelled before its first step would not run at all
            self.task.cancel()

    def tell(self) -> None:
        """Send how far the request is. Nothing is said before its ACK."""
        if self._ticket is not None:
            self._send(self._info(self._ticket))

    def _info(self, ticket: Ticket) -> bytes:
        if (place := self._scheduler.place(ticket)) is not None:
            return replies.queued(self.id, place=place)
        if ticket.tokens:
            return replies.generating(self.id, tokens=ticket.tokens)
        return replies.prefill(self.id, done=ticket.read, total=len(ticket.request.prompt))

    async def _run(self) -> None:
        self._begun = True
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            async with asyncio.timeout_at(self._until()) as self._patience:
                if self._kind == "chat":
                    if self._session.turn.locked():
                        self.settled.set()
                    async with self._session.turn:
                        await self._generate()
                else:
                    await self._generate()
        except asyncio.CancelledError:
            if self._ticket is not None:
                raise
            self._ended_early("cancelled")
        except TimeoutError:
            self._ended_early("deadline")
        except Exception as error:
            if not isinstance(error, ColiError):
                log.exception("request %d failed", self._record.key)
            self._record.refused(error)
            # A client that named no id learns of one by ACK only.
            self._send(answers.refusal(error, self.id if self._ticket else self._command.id))
        finally:
            del self._session.requests[self.id]
            self.settled.set()
            self._record.write(
                self._ticket, "".join(self._answer) if self._core.settings.log_prompts else None
            )

    async def _generate(self) -> None:
        self._scheduler.check()
        request = await self._request()
        self._ticket = self._scheduler.submit(request, self._session, self._on_text)
        self._patience.reschedule(None)  # from here on the engine minds the deadline
        self._acknowledge(len(request.prompt))
        event = await self._ticket.ended
        self._record.ended(event)
        if isinstance(event, Failed):
            self._send(answers.failure(event, self.id))
        else:
            await self._remember(event)
            self._done(event)

    async def _prompt(self) -> tuple[int, ...]:
        """The prompt's tokens `[prompt_tokens]`. Raises ColiError for a prompt that cannot be used."""
        if self._command.token_ids is not None:
            return self._prompts.of_ids(self._command.token_ids)
        if self._kind == "gen":
            return await self._prompts.of_text(self._command.text)
        messages = self._session.messages(self._options["system"], self._command.text)
        return await self._prompts.of_dialogue(messages)

    async def _request(self) -> GenerationRequest:
        prompt, options = await self._prompt(), self._options
        return GenerationRequest(
            key=self._record.key,
            session=self._session.key,
            kind=self._kind,
            prompt=prompt,
            max_tokens=min(options["max"], self._prompts.capacity - len(prompt)),
            policy=self._policy,
            sampling=sampling_of(options),
            stop=options["stop"],
            logprobs=options["logprobs"],
            deadline=self._deadline,
        )

    def _acknowledge(self, prompt_tokens: int) -> None:
        self._send(replies.ack(self.id, prompt_tokens=prompt_tokens, session=self._session.name))
        self.settled.set()

    def _until(self) -> float | None:
        """The deadline by the event loop's clock."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline - time.monotonic()

    def _ended_early(self, finish: EarlyEnd) -> None:
        """The engine never heard of the request: it was accepted, and it is over."""
        self._scheduler.count_early(self._session, finish)
        self._acknowledge(0)
        event = Finished(0, finish, Counters(), 0, 0, None, 0.0)
        self._record.ended(event)
        self._done(event)

    def _done(self, event: Finished) -> None:
        self._send(answers.done(self.id, event, seed=self._options["seed"], policy=self._policy))

    def _on_text(self, chunk: TextChunk) -> None:
        self._answer.append(chunk.text)
        if chunk.text or chunk.logprobs:
            self._send(answers.token(self.id, chunk))

    async def _remember(self, event: Finished) -> None:
        """Keep a CHAT's turn, an answer that was cut short included, but no turn that got no answer."""
        answer = "".join(self._answer)
        if self._kind == "chat" and (answer or event.finish in ("stop", "length")):
            self._session.say(self._command.text, answer)
            await self._core.dialogues.save(self._session)


class Scoring(Generation):
    """One SCORE of a session. `options` must say `cache_route` only where the client itself did."""

    async def _request(self) -> GenerationRequest:
        assert self._command.score is not None
        context, continuation = await self._prompts.of_score(self._command.score)
        return GenerationRequest(
            key=self._record.key,
            session=self._session.key,
            kind="score",
            prompt=context,
            max_tokens=len(continuation),
            policy=self._policy,
            continuation=continuation,
            deadline=self._deadline,
        )

    def _done(self, event: Finished) -> None:
        self._send(answers.scored(self.id, event, self._policy))


def _deadline(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else time.monotonic() + milliseconds / 1000
