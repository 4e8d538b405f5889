"""From a command's text to a prompt: tokenizer and chat template, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

from coli_server.daemon.sessions import Message
from coli_server.engine.scoring import split_tokens
from coli_server.engine.text import Text
from coli_server.protocol.commands import ScoreText
from coli_server.protocol.errors import ProtocolError

P = ParamSpec("P")
T = TypeVar("T")


class Prompts:
    """Makes prompts in `executor`: token ids under `vocabulary`, fewer than `capacity` of them."""

    def __init__(self, text: Text, vocabulary: int, capacity: int, executor: Executor) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self._executor = executor
        self.capacity = capacity

    async def of_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text to be continued, `[prompt_tokens]`."""
        return self._checked(await self._run(self._text.encode, text))

    async def of_dialogue(self, messages: list[Message]) -> tuple[int, ...]:
        """The tokens of a dialogue, ready for the assistant's turn, `[prompt_tokens]`."""
        return self._checked(await self._run(self._text.encode_chat, messages))

    async def of_score(self, score: ScoreText) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a context, never empty, and of the continuation that is to be scored behind it."""
        context, continuation = score.context, score.continuation
        if isinstance(context, str) and isinstance(continuation, str):
            before, behind = await self._run(split_tokens, self._text, context, continuation)
        else:
            before, behind = [int(id) for id in context], [int(id) for id in continuation]
            before = before or [self._text.beginning]
        ids = self._in_vocabulary((*before, *behind))
        if len(ids) > self.capacity:
            raise self._exceeded(len(ids), "the context and its continuation do not fit")
        return ids[: len(before)], ids[len(before) :]

    def of_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids that the client gave, `[prompt_tokens]`."""
        return self._checked(self._in_vocabulary(ids))

    async def _run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run `work` away from the loop. Raises Exceptions only."""

        def guarded() -> T:
            try:
                return work(*args, **named)
            except Exception:
                raise
            except BaseException as error:  # a panic of the tokenizer's native code; it must end no task
                raise RuntimeError(f"the tokenizer failed: {type(error).__name__}") from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, guarded)

    def _in_vocabulary(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        for id in ids:
            if id >= self._vocabulary:
                raise ProtocolError("BAD_REQUEST", f"token id {id} is not in [0, {self._vocabulary})")
        return ids

    def _checked(self, ids: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise ProtocolError("BAD_REQUEST", "the text has no tokens")
        if len(ids) >= self.capacity:
            raise self._exceeded(len(ids), "the prompt leaves no room for an answer")
        return tuple(ids)

    def _exceeded(self, tokens: int, message: str) -> ProtocolError:
        details = {"prompt_tokens": tokens, "capacity": self.capacity}
        return ProtocolError("CONTEXT_EXCEEDED", message, details=details)
