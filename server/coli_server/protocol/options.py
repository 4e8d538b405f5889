"""Every option word of the protocol once: what it accepts, its default, which verbs take it, its help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coli_server.protocol.errors import ProtocolError
from coli_server.protocol.words import quote
from coli_server.ranges import FLAG, INT32_MAX, ROUTING, SAMPLING, NumberRange, Range, Value

OptionValue = Value | tuple[str, ...]

MAX_STOPS: Final = 4
_REQUESTS: Final = ("GEN", "CHAT", "SCORE")

_IDENTIFIER = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
IDENTIFIER_RULE: Final = "1 to 64 of letters, digits, '.', '_' and '-'"

_TOKEN_IDS = re.compile(r"[0-9]{1,10}(?:,[0-9]{1,10})*", re.ASCII)
_TOKEN_ID = NumberRange(0, INT32_MAX, integer=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One option word `name=value`.

    `accepts` is None for the options whose value is not a number or a choice; `rule` then says what it is.
    `default` is what holds when neither the request nor its session says anything; None leaves that to the
    daemon's settings. `settable` options can be kept for the session with SET.
    """

    name: str
    help: str
    accepts: Range | None = None
    rule: str = ""
    default: OptionValue = None
    verbs: tuple[str, ...] = ("GEN", "CHAT")
    settable: bool = True

    @property
    def range_text(self) -> str:
        """What the value may be, in words."""
        return self.rule or str(self.accepts)


def _sampling(name: str, help: str, default: OptionValue = None, *, settable: bool = True) -> Option:
    return Option(name, help, SAMPLING[name], default=default, settable=settable)


def _routing(name: str, help: str) -> Option:
    return Option(name, help, ROUTING[name], verbs=_REQUESTS)


_TABLE: Final = (
    Option(
        "id",
        "names the request; the command then runs beside the ones that follow it",
        rule=IDENTIFIER_RULE,
        verbs=_REQUESTS,
        settable=False,
    ),
    _sampling("max", "most tokens to generate; cut to the room that is left", 256),
    _sampling("temp", "temperature; 0 takes the likeliest token", 0.0),
    _sampling("top_p", "draw from the likeliest tokens that hold this share of the mass", 1.0),
    _sampling("top_k", "draw from this many of the likeliest tokens; 0 is all", 0),
    _sampling("min_p", "drop tokens below this share of the likeliest one's probability", 0.0),
    _sampling("repeat_penalty", "divide the scores of tokens seen already; 1 changes nothing", 1.0),
    _sampling("seed", "seed of this request's draws", 0, settable=False),
    Option(
        "stop",
        f"ends the answer before this text; up to {MAX_STOPS} times",
        rule="a text, not empty",
        default=(),
    ),
    Option("system", "system prompt of the dialogue", rule="a text", default="", verbs=("CHAT",)),
    Option(
        "bytes",
        "the text follows the line as exactly this many bytes, then LF",
        rule="decimal digits",
        verbs=(),
        settable=False,
    ),
    Option(
        "ids",
        "1: the text is token ids with commas between them",
        FLAG,
        default=False,
        verbs=("GEN",),
        settable=False,
    ),
    _sampling("logprobs", "report the chosen token's and this many best log-probabilities"),
    Option(
        "deadline_ms",
        "end the request after this many milliseconds",
        SAMPLING["deadline_ms"],
        verbs=_REQUESTS,
        settable=False,
    ),
    _routing("cache_route", "1: choose experts with an eye on the cache"),
    _routing("route_mode", "how: max-rank or cache-prior"),
    _routing("route_j", "the router's best J are always taken"),
    _routing("route_m", "max-rank: how far down the ranking a resident expert may be taken from"),
    _routing("route_p", "max-rank: the window is the experts that hold this share of the mass; 0 uses M"),
    _routing("route_alpha", "gate mass of substituted experts is multiplied by this"),
    _routing("route_lambda", "cache-prior: how strongly residents are preferred"),
    _routing("route_scope", "what counts as resident: the shared cache, or this request's own choices"),
    _routing("route_capacity", "session scope: experts a layer that count as resident; 0 is automatic"),
    _routing("route_prefill", "1: prompts are routed so too"),
    _routing("route_agree", "agreement and KL meters"),
)

OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({option.name: option for option in _TABLE})
SETTABLE: Final = tuple(option.name for option in _TABLE if option.settable)
DEFAULTS: Final[Mapping[str, OptionValue]] = MappingProxyType(
    {option.name: option.default for option in _TABLE if option.default is not None}
)


def find_option(name: str, hint: str = "") -> Option:
    """The option called `name`; raises ProtocolError BAD_OPTION, whose message ends in `hint`, if unknown."""
    try:
        return OPTIONS[name]
    except KeyError:
        raise ProtocolError("BAD_OPTION", f"unknown option {quote(name)}{hint}") from None


def parse_value(option: Option, word: str) -> OptionValue:
    """The typed value of one option word; a text option's value is the text itself.

    Raises ProtocolError BAD_OPTION naming the option, its value and what it accepts.
    """
    if option.accepts is not None:
        try:
            return option.accepts.parse(word)
        except ValueError:
            raise _outside(option, word) from None
    if (option.name == "id" and not is_identifier(word)) or (option.name == "stop" and not word):
        raise _outside(option, word)
    return word


def is_identifier(word: str) -> bool:
    """Whether `word` may name a request or a session."""
    return _IDENTIFIER.fullmatch(word) is not None


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Token ids from `1,2,3`; raises ProtocolError BAD_REQUEST."""
    if _TOKEN_IDS.fullmatch(text):
        ids = tuple(int(word) for word in text.split(","))
        if all(_TOKEN_ID.contains(token) for token in ids):
            return ids
    raise ProtocolError(
        "BAD_REQUEST", f"with ids=1 the text must be token ids with commas between them, each {_TOKEN_ID}"
    )


def is_token_id(value: object) -> bool:
    """Whether `value`, out of JSON, may be a token id of some vocabulary."""
    return type(value) is int and _TOKEN_ID.contains(value)


def _outside(option: Option, word: str) -> ProtocolError:
    return ProtocolError("BAD_OPTION", f"option {option.name} must be {option.range_text}, not {quote(word)}")
