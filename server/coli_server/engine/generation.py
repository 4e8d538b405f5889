"""One running request inside the engine: from its prompt's ids to text, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.api import Finish, Finished, GenerationRequest, TextChunk, TokenLogprob
from coli_server.engine.sampler import Sampler, best_tokens, log_softmax
from coli_server.engine.step import Sequence, Span
from coli_server.engine.stopping import StopFilter
from coli_server.engine.text import Text

F32 = NDArray[np.float32]


SHORT_PROMPT = 64
"""So few unread tokens are read in one step beside whatever decodes. Running sequences wait for it once; in
small pieces they would wait several times, and the request as long as a dozen of their tokens."""


class Generation:
    """State of one request on the engine thread.

    Every sampled token counts as generated, the end token too, so n tokens mean n - 1 decode steps; the end
    token has no text.
    """

    def __init__(
        self, request: GenerationRequest, sequence: Sequence, text: Text, end_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.short = len(request.prompt) - sequence.position <= SHORT_PROMPT
        """Whether its prompt, less what was in the KV cache already, is read in one piece."""
        self.tokens: list[int] = []
        self._end_ids = end_ids
        self._text = text
        self._stream = text.stream(request.prompt)
        self._stops = StopFilter(request.stop)
        self._sampler = Sampler(request.sampling, request.prompt)
        self._unsent: list[int] = []
        self._unsent_logprobs: list[tuple[TokenLogprob, ...]] = []
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the KV cache."""
        return min(self.sequence.position, len(self.request.prompt))

    @property
    def in_prompt(self) -> bool:
        return not self.tokens

    def next_span(self, chunk: int) -> Span:
        """What the next step computes: up to `chunk` prompt tokens, or the latest generated token."""
        position, prompt = self.sequence.position, self.request.prompt
        if self.in_prompt:
            part = prompt[position : position + chunk]
            last = position + len(part) == len(prompt)
            return Span(self.sequence, part, True, len(prompt), "last" if last else "none")
        return Span(self.sequence, (self.tokens[-1],), False, position + 1)

    def accept(self, logits: F32, now: float) -> tuple[TextChunk | None, Finish | None]:
        """Draw the next token from `logits`, float32 [1, vocab], at time `now` (seconds, monotonic).

        Returns the text that may be sent now, and how the request ended if it did.
        """
        (row,) = logits
        token = self._sampler.choose(row)
        self.tokens.append(token)
        counters = self.sequence.counters
        counters.generated_tokens_total += 1
        if self._last is not None:
            counters.decode_steps += 1
            counters.decode_seconds += now - self._last
        self._first = now if self._first is None else self._first
        self._last = now
        if token in self._end_ids:
            return self._flush(), "stop"
        self._unsent.append(token)
        if self.request.logprobs is not None:
            self._unsent_logprobs.append(self._logprobs(token, row, self.request.logprobs))
        ready = self._stops.push(self._stream.push(token))
        if self._stops.stopped:
            return self._chunk(ready), "stop"
        if len(self.tokens) == self.request.max_tokens:
            return self._flush(ready), "length"
        return self._chunk(ready), None

    def end(self, finish: Finish) -> tuple[TextChunk | None, Finished]:
        """The last text and the closing event of a request that ends between two tokens."""
        return self._flush(), self.finished(finish)

    def finished(self, finish: Finish) -> Finished:
        ttft = None if self._first is None else self._first - self._submitted
        decode = 0.0 if self._first is None or self._last is None else self._last - self._first
        return Finished(
            self.request.key,
            finish,
            self.sequence.counters.copy(),
            len(self.tokens),
            len(self.request.prompt),
            ttft,
            decode,
        )

    def since(self, submitted: float) -> None:
        """The request was submitted at `submitted` (seconds, monotonic), before it waited in a queue."""
        self._submitted = submitted

    def _flush(self, text: str = "") -> TextChunk | None:
        """`text` and everything that was held back: an unfinished character, the head of a stop string."""
        text += self._stops.push(self._stream.flush())
        return self._chunk(text if self._stops.stopped else text + self._stops.flush())

    def _chunk(self, text: str) -> TextChunk | None:
        if not text:
            return None
        chunk = TextChunk(self.request.key, text, tuple(self._unsent), tuple(self._unsent_logprobs))
        self._unsent, self._unsent_logprobs = [], []
        return chunk

    def _logprobs(self, token: int, logits: F32, count: int) -> tuple[TokenLogprob, ...]:
        """The chosen token, then the `count` best ones."""
        logprobs = log_softmax(logits)
        ids: Seq[int] = [token, *best_tokens(logprobs, count)]
        return tuple(TokenLogprob(i, self._text.token_text(i), float(logprobs[i])) for i in ids)
