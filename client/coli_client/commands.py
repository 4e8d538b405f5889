"""Commands to bytes. Whatever the caller passes, the bytes of one call hold exactly one command.

Free text goes as a length-prefixed payload, string options as ASCII JSON strings, ids and words by a closed
pattern, numbers by `int.__repr__` and `float.__repr__` of real numbers: nothing can bring a line break.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar

from coli_client import parser
from coli_client.results import Session, StatLine, Stats, Version

__all__ = ["Command", "Options", "Request"]

MAX_LINE = 65_536
"""Bytes of a command line, its LF included, that every server takes (the text is not on the line)."""

MAX_STOPS = 4

T_co = TypeVar("T_co", covariant=True)

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ID_OR_ANONYMOUS = re.compile(r"~?[A-Za-z0-9._-]{1,64}")
_SECTION = re.compile(r"[a-z_]{1,32}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,256}")
_VERB = re.compile(r"[A-Za-z]{1,32}")


class Options(TypedDict, total=False):
    """What `generate` and `chat` take as keywords: the protocol's option names.

    Types are checked here, before anything is sent; ranges are the server's to judge.
    """

    id: str
    max: int
    temp: float
    top_p: float
    top_k: int
    min_p: float
    repeat_penalty: float
    seed: int
    stop: str | Sequence[str]
    system: str
    logprobs: int
    deadline_ms: int
    cache_route: bool
    route_mode: str
    route_j: int
    route_m: int
    route_p: float
    route_alpha: float
    route_lambda: float
    route_scope: str
    route_capacity: int
    route_prefill: bool
    route_agree: bool | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Command(Generic[T_co]):
    """A command that is answered in order; `parse` makes its value of the reply's lines (`END` left out)."""

    data: bytes = field(repr=False)
    parse: Callable[[Sequence[str]], T_co]
    multiline: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A generation: it runs beside later commands, and its lines carry `id`."""

    data: bytes
    id: str


def checked_id(name: str, value: object) -> str:
    """`value` as an exact `str` if it is an id by the protocol, else `TypeError` or `ValueError`."""
    return _matching(name, value, _ID, "1 to 64 of letters, digits, '.', '_' and '-'")


def ping() -> Command[None]:
    return Command(b"PING\n", parser.expect("PONG"))


def version() -> Command[Version]:
    return Command(b"VERSION\n", parser.version)


def help(verb: str | None = None) -> Command[str]:
    word = "" if verb is None else " " + _matching("verb", verb, _VERB, "1 to 32 letters")
    return Command(_line("HELP" + word), parser.text, multiline=True)


def stat(section: str | None = None, session: str | None = None) -> Command[Stats]:
    words = ["STAT"]
    if section is not None:
        words.append(_matching("section", section, _SECTION, "1 to 32 of a-z and '_'"))
    if session is not None:
        if words[1:] != ["session"]:
            raise ValueError(f"session={session!r} goes with section='session' only, not with {section!r}")
        # Sessions without a name are shown as ~1, ~2: they can be looked at, not attached to.
        words.append(_matching("session", session, _ID_OR_ANONYMOUS, "an id, or '~' and an id"))
    if words[1:] in (["line"], ["reset"]):
        raise ValueError(f"section {section!r} is not a table: call stat_{section}()")
    return Command(_line(" ".join(words)), parser.stats, multiline=True)


def stat_line() -> Command[StatLine]:
    return Command(b"STAT line\n", parser.stat_line)


def stat_reset() -> Command[None]:
    return Command(b"STAT reset\n", parser.expect("RESET"))


def auth(token: str) -> Command[None]:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError("token must be 1 to 256 of letters, digits and -._~+/")  # never show it
    return Command(_line("AUTH " + str.__str__(token)), parser.expect("OK"))


def session(id: str) -> Command[Session]:
    return Command(_line("SESSION " + checked_id("id", id)), parser.session)


def set_option(option: str, value: object) -> Command[None]:
    name = _known(option)
    if name in _NOT_SETTABLE:
        raise ValueError(f"option {name!r} belongs to one request: pass it to generate() or chat()")
    return Command(_line(f"SET {name} {_OPTIONS[name](name, value)}"), parser.expect("OK"))


def cancel(id: str) -> Command[None]:
    return Command(_line("CANCEL " + checked_id("id", id)), parser.expect("OK"))


def reset() -> Command[None]:
    return Command(b"RESET\n", parser.expect("OK"))


QUIT = b"QUIT\n"


def generate(prompt: str | Sequence[int], id: str, options: Mapping[str, Any]) -> Request:
    """`GEN` of a text, or of token ids; `id` is used unless `options` names one."""
    if isinstance(prompt, str):
        return _request("GEN", prompt, id, options, ())
    return _request("GEN", _token_ids(prompt), id, options, ("ids=1",))


def chat(text: str, id: str, options: Mapping[str, Any]) -> Request:
    """`CHAT`: one user turn; `id` is used unless `options` names one."""
    return _request("CHAT", text, id, options, ())


def score(
    context: str | Sequence[int], continuation: str | Sequence[int], id: str, options: Mapping[str, Any]
) -> Request:
    """`SCORE` of a continuation behind a context: two texts, or token ids of both."""
    if isinstance(context, str) != isinstance(continuation, str):
        raise TypeError("context and continuation must both be a str or both be token ids")
    before, behind = _score_part("context", context), _score_part("continuation", continuation)
    return _request("SCORE", f'{{"context":{before},"continuation":{behind}}}', id, options, ())


def scores(
    pairs: Iterable[tuple[str | Sequence[int], str | Sequence[int]]],
    next_id: Callable[[], str],
    options: Mapping[str, Any],
) -> list[Request]:
    """A `SCORE` for each (context, continuation)."""
    if "id" in options:
        raise TypeError("id names one request; score_all() names its requests itself")
    return [score(context, continuation, next_id(), options) for context, continuation in pairs]


def _score_part(name: str, value: str | Sequence[int]) -> str:
    return _quoted(name, value) if isinstance(value, str) else f"[{_token_ids(value)}]"


def _request(verb: str, text: str, id: str, options: Mapping[str, Any], extra: Sequence[str]) -> Request:
    id = checked_id("id", options.get("id", id))
    payload = _exact("prompt", text).encode()
    words = [verb, "id=" + id]
    for name, value in options.items():
        if _known(name) == "id":
            continue
        if name == "stop":
            words += ["stop=" + _quoted("stop", stop) for stop in _stops(value)]
        else:
            words.append(f"{name}={_OPTIONS[name](name, value)}")
    words += [*extra, f"bytes={len(payload)}"]
    return Request(_line(" ".join(words)) + payload + b"\n", id)


def _line(text: str) -> bytes:
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"the options take {len(line)} bytes as a line; a line may have {MAX_LINE}")
    return line


def _exact(name: str, value: object) -> str:
    """`value` as an exact `str` (a subclass could lie about itself) that UTF-8 can hold."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    exact = str.__str__(value)
    try:
        exact.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a surrogate pair at character {error.start}") from None
    return exact


def _matching(name: str, value: object, pattern: re.Pattern[str], accepted: str) -> str:
    exact = _exact(name, value)
    if not pattern.fullmatch(exact):
        raise ValueError(f"{name}={exact[:80]!r} must be {accepted}")
    return exact


def _known(name: object) -> str:
    exact = _exact("option", name)
    if exact not in _OPTIONS:
        raise TypeError(f"unknown option {exact[:80]!r}; known are {', '.join(_OPTIONS)}")
    return exact


def _quoted(name: str, value: object) -> str:
    return json.dumps(_exact(name, value), ensure_ascii=True)


def _whole(name: str, value: object) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    number = int.__index__(value)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{name} must fit 64 bits")
    return repr(number)


def _real(name: str, value: object) -> str:
    if not isinstance(value, float):
        return _whole(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name}={float.__repr__(value)} must be finite")
    return float.__repr__(value)


def _flag(name: str, value: object) -> str:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    number = int.__index__(value)
    if number not in (0, 1):
        raise ValueError(f"{name} must be True or False")
    return repr(number)


def _flag_or_auto(name: str, value: object) -> str:
    return "auto" if value == "auto" else _flag(name, value)


def _stops(value: object) -> Sequence[object]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"stop must be a str or a sequence of str, not {type(value).__name__}")
    stops = tuple(value)
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    return stops


def _token_ids(prompt: object) -> str:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise TypeError(f"prompt must be a str or a sequence of token ids, not {type(prompt).__name__}")
    words = [_whole("token id", token) for token in prompt]
    if any(word.startswith("-") for word in words):
        raise ValueError("a token id must not be negative")
    return ",".join(words)


_OPTIONS: Mapping[str, Callable[[str, object], str]] = {
    "id": checked_id,
    "max": _whole,
    "temp": _real,
    "top_p": _real,
    "top_k": _whole,
    "min_p": _real,
    "repeat_penalty": _real,
    "seed": _whole,
    "stop": _quoted,
    "system": _quoted,
    "logprobs": _whole,
    "deadline_ms": _whole,
    "cache_route": _flag,
    "route_mode": _quoted,
    "route_j": _whole,
    "route_m": _whole,
    "route_p": _real,
    "route_alpha": _real,
    "route_lambda": _real,
    "route_scope": _quoted,
    "route_capacity": _whole,
    "route_prefill": _flag,
    "route_agree": _flag_or_auto,
}
_NOT_SETTABLE = frozenset({"id", "seed", "deadline_ms"})
