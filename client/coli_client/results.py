"""What comes back: frozen values with the protocol's own names and units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Ack", "Chunk", "Info", "Logprob", "Result", "Score", "Session", "StatLine", "Stats", "Version"]


@dataclass(frozen=True, slots=True)
class Ack:
    """The request `id` was accepted and queued in `session`; its prompt has `prompt_tokens` tokens."""

    id: str
    prompt_tokens: int
    session: str


@dataclass(frozen=True, slots=True)
class Info:
    """News of a request while it waits: `fields` holds for example `{"prefill": "512/2048"}`."""

    id: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token: its id, its text and its natural log-probability. `top` holds the likeliest in its place."""

    id: int
    text: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of generated text, complete characters only; `str(chunk)` is the text.

    `logprobs` has one entry for each token of the piece when the request asked for them.
    """

    id: str
    text: str
    logprobs: tuple[Logprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a generation: its whole text and its figures.

    `finish` is `stop`, `length`, `cancelled`, `deadline` or `drained`. A figure that the server did not
    give is `None`; every word of the server's line, known here or not, is in `fields`.
    Percentages are 0 to 100, `ttft_ms` is milliseconds to the first token, `tok_s` tokens a second,
    `route_kl` nats.
    """

    id: str
    text: str
    finish: str
    tokens: int
    prompt_tokens: int
    session: str = ""
    seed: int | None = None
    ttft_ms: float | None = None
    tok_s: float | None = None
    hit_pct: float | None = None
    lookups: int | None = None
    swap_pct: float | None = None
    route_swaps: int | None = None
    route_slots: int | None = None
    route_agree: float | None = None
    route_kl: float | None = None
    mode: str | None = None
    scope: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is behind its context.

    `logprob` is the sum of the natural log-probabilities of its `tokens` tokens, bit for bit the server's;
    `greedy` says that each of them was the likeliest one. The context had `prompt_tokens` tokens. Every word
    of the server's line is in `fields`.
    """

    id: str
    logprob: float
    tokens: int
    greedy: bool
    prompt_tokens: int
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Version:
    """The server's version and the number of the protocol that it speaks."""

    version: str
    protocol: int


@dataclass(frozen=True, slots=True)
class Session:
    """The session that the connection is attached to; `new` when this call created it."""

    id: str
    new: bool


@dataclass(frozen=True, slots=True)
class StatLine:
    """The one-line figures of the session's last request; routing figures are `None` with routing off."""

    tokens: int
    tok_s: float
    hit_pct: float
    rss_gb: float
    prompt_tokens: int
    length_limited: bool
    swap_pct: float | None = None
    route_swaps: int | None = None
    route_slots: int | None = None
    route_agree: float | None = None
    route_kl: float | None = None


class Stats(dict[str, str]):
    """`STAT` figures by name, in the server's order, values as sent."""

    def number(self, name: str) -> int | float:
        """The figure `name` as a number; `KeyError` when it is not there, `ValueError` when it is text."""
        value = self[name]
        try:
            return int(value)
        except ValueError:
            return float(value)
