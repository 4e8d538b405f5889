"""From a command's text to a prompt: tokenizer and chat template, away from the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from coli_server.daemon.sessions import Message
from coli_server.engine.scoring import split_tokens
from coli_server.engine.text import Text
from coli_server.protocol.commands import ScoreText
from coli_server.protocol.errors import ProtocolError


class Prompts:
    """Makes prompts in `executor`: token ids under `vocabulary`, fewer than `capacity` of them."""

    def __init__(self, text: Text, vocabulary: int, capacity: int, executor: Executor) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self._executor = executor
        self.capacity = capacity

    async def of_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text to be continued, `[prompt_tokens]`."""
        loop = asyncio.get_running_loop()
        return self._checked(await loop.run_in_executor(self._executor, self._text.encode, text))

    async def of_dialogue(self, messages: list[Message]) -> tuple[int, ...]:
        """The tokens of a dialogue, ready for the assistant's turn, `[prompt_tokens]`."""
        loop = asyncio.get_running_loop()
        return self._checked(await loop.run_in_executor(self._executor, self._text.encode_chat, messages))

    async def of_score(self, score: ScoreText) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a context, never empty, and of the continuation that is to be scored behind it."""
        context, continuation = score.context, score.continuation
        if isinstance(context, str) and isinstance(continuation, str):
            loop = asyncio.get_running_loop()
            before, behind = await loop.run_in_executor(
                self._executor, split_tokens, self._text, context, continuation
            )
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
