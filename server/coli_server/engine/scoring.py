"""One running SCORE inside the engine: how likely is a continuation behind a context?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.api import Finish, Finished, GenerationRequest, Score
from coli_server.engine.sampler import log_softmax
from coli_server.engine.step import Sequence, Span
from coli_server.engine.text import Text
from coli_server.errors import ModelError

F32 = NDArray[np.float32]

LOGIT_ROWS = 24
"""Rows of logits that a scored text asks of a step at most: a row is as wide as the vocabulary."""


class Scoring:
    """State of one SCORE on the engine thread, with the methods of a `Generation`.

    Under stock routing the continuation is read like a prompt, many tokens a step. Under another policy it
    is fed one token a step, as if it were being generated: only so does routing see what it would see.
    The logits behind the last token are never needed, so that token is not computed.
    """

    def __init__(self, request: GenerationRequest, sequence: Sequence) -> None:
        self.request = request
        self.sequence = sequence
        self._ids = request.prompt + request.continuation
        self._decodes = request.policy.active
        self._logprob = 0.0
        self._greedy = True
        self._scored = 0

    @property
    def prefilled(self) -> int:
        """Tokens of the context that are in the KV cache."""
        return min(self.sequence.position, len(self.request.prompt))

    @property
    def in_prompt(self) -> bool:
        """Whether the next span may have many tokens."""
        return not self._decodes or self.sequence.position < len(self.request.prompt)

    def next_span(self, chunk: int) -> Span:
        """What the next step computes: up to `chunk` tokens. Only a span of the continuation wants logits."""
        position, first_wanted = self.sequence.position, len(self.request.prompt) - 1
        if not self.in_prompt:
            return Span(self.sequence, (self._ids[position],), False, position + 1)
        if position < first_wanted:
            part = self._ids[position : min(position + chunk, first_wanted)]
            return Span(self.sequence, part, True, len(self._ids), "none")
        end = first_wanted + 1 if self._decodes else len(self._ids) - 1
        part = self._ids[position : min(position + min(chunk, LOGIT_ROWS), end)]
        return Span(self.sequence, part, True, len(self._ids), "all")

    def accept(self, logits: F32, now: float) -> tuple[None, Finish | None]:
        """Score the next tokens by `logits`, float32 [tokens, vocab]; says `stop` behind the last one.

        Raises ModelError where the logits are not finite.
        """
        del now
        for row in logits:
            token = self.request.continuation[self._scored]
            logprob = float(log_softmax(row)[token])
            if not np.isfinite(logprob) or not np.isfinite(row.max()):
                raise ModelError(f"token {token} has the log-probability {logprob}: the arithmetic failed")
            self._logprob += logprob
            self._greedy &= int(np.argmax(row)) == token
            self._scored += 1
        return None, "stop" if self._scored == len(self.request.continuation) else None

    def end(self, finish: Finish) -> tuple[None, Finished]:
        """The closing event of a request that ends before all of it is scored."""
        return None, self.finished(finish)

    def finished(self, finish: Finish) -> Finished:
        complete = self._scored == len(self.request.continuation)
        return Finished(
            self.request.key,
            finish,
            self.sequence.counters.copy(),
            self._scored,
            len(self.request.prompt),
            None,
            0.0,
            Score(self._logprob, self._greedy) if complete else None,
        )


def split_tokens(text: Text, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of `context` + `continuation`, cut where the continuation begins.

    The two are tokenized as one text, as the model would read them. A token that spans the border belongs
    to the continuation. Behind an empty context stands the model's mark of where a text begins.
    """
    whole = text.encode(context + continuation)
    before = text.encode(context)
    border = 0
    while border < min(len(before), len(whole)) and before[border] == whole[border]:
        border += 1
    if border:
        return whole[:border], whole[border:]
    return [text.beginning], whole
