"""What each routing and sampling option accepts: ranges, the strict reading of a word, words for people.

Environment variables, command-line flags, option words of the protocol and `RoutePolicy` all use this one
table, so a value that one of them refuses is refused by all of them with the same explanation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

Value = bool | int | float | str | None

Activations = Literal["float32", "bfloat16"]
"""What products of bfloat16 weights take activations as."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# ASCII digits only: int() and float() also take signs, blanks, underscores, other scripts' digits, inf, nan.
# The lengths are those of the largest values, and of what Python prints for a float.
_INTEGER = re.compile(r"[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NumberRange:
    """An interval of integers or of finite real numbers; each end belongs to it unless it is open."""

    low: int | float
    high: int | float
    integer: bool = False
    low_open: bool = False
    high_open: bool = False

    def parse(self, word: str) -> int | float:
        """The number that `word` spells; raises ValueError ("must be ...") for anything else."""
        grammar = _INTEGER if self.integer else _NUMBER
        if grammar.fullmatch(word):
            number = int(word) if self.integer else float(word)
            if self.contains(number):
                return number
        raise ValueError(f"must be {self}")

    def contains(self, value: object) -> bool:
        """Whether `value` is a number of the right kind inside the interval. NaN and booleans never are."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.integer else Real):
            return False
        number: Any = value
        above = self.low < number if self.low_open else self.low <= number
        below = number < self.high if self.high_open else number <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        noun = "an integer" if self.integer else "a number"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"{noun} in {left}{self.low}, {self.high}{right}"


@dataclass(frozen=True, slots=True)
class Choices:
    """A closed list of words and the value that each one means."""

    values: tuple[tuple[str, Value], ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The accepted words, in the order in which they are shown."""
        return tuple(word for word, _ in self.values)

    def parse(self, word: str) -> Value:
        """The value that `word` stands for; raises ValueError ("must be ...") for an unknown word."""
        for known, value in self.values:
            if known == word:
                return value
        raise ValueError(f"must be {self}")

    def contains(self, value: object) -> bool:
        """Whether `value` is what one of the words stands for; 1 is not True here."""
        return any(type(value) is type(known) and value == known for _, known in self.values)

    def __str__(self) -> str:
        *others, last = self.words
        return f"{', '.join(others)} or {last}"


Range = NumberRange | Choices


def _integer(low: int, high: int) -> NumberRange:
    return NumberRange(low, high, integer=True)


def _words(*words: str) -> Choices:
    return Choices(tuple((word, word) for word in words))


FLAG = Choices((("0", False), ("1", True)))
FLAG_OR_AUTO = Choices((("auto", None), ("0", False), ("1", True)))

ROUTING: Mapping[str, Range] = MappingProxyType(
    {
        "cache_route": FLAG,
        "route_mode": _words("max-rank", "cache-prior"),
        "route_j": _integer(0, INT32_MAX),
        "route_m": _integer(1, INT32_MAX),
        "route_p": NumberRange(0, 1, high_open=True),
        "route_alpha": NumberRange(0, 1, low_open=True),
        "route_lambda": NumberRange(0, 1),
        "route_agree": FLAG_OR_AUTO,
        "route_scope": _words("shared", "session"),
        "route_capacity": _integer(0, INT32_MAX),
        "route_prefill": FLAG,
    }
)
"""Routing options by their lower-case names; the environment variable is the same name in upper case."""

SAMPLING: Mapping[str, Range] = MappingProxyType(
    {
        "max": _integer(1, INT32_MAX),
        "temp": NumberRange(0, 100),
        "top_p": NumberRange(0, 1, low_open=True),
        "top_k": _integer(0, INT32_MAX),
        "min_p": NumberRange(0, 1),
        # Beyond a factor of ten either way a penalised logit says nothing any more and may overflow.
        "repeat_penalty": NumberRange(0.1, 10),
        "seed": _integer(0, INT64_MAX),
        "logprobs": _integer(0, 20),
        # A week: a model streamed from a slow disk may need days for a long answer.
        "deadline_ms": _integer(1, 7 * 24 * 3600 * 1000),
    }
)
"""Options of drawing tokens and of a request's size, by their names in the protocol."""
