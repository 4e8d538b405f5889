"""From a command's text to a prompt: tokenizer and chat template, away from the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from coli_server.daemon.sessions import Message
from coli_server.engine.text import Text
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

    def of_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids that the client gave, `[prompt_tokens]`."""
        for id in ids:
            if id >= self._vocabulary:
                raise ProtocolError("BAD_REQUEST", f"token id {id} is not in [0, {self._vocabulary})")
        return self._checked(ids)

    def _checked(self, ids: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise ProtocolError("BAD_REQUEST", "the text has no tokens")
        if len(ids) >= self.capacity:
            details = {"prompt_tokens": len(ids), "capacity": self.capacity}
            raise ProtocolError(
                "CONTEXT_EXCEEDED", "the prompt leaves no room for an answer", details=details
            )
        return tuple(ids)
