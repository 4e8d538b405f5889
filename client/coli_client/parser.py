"""Reply lines to values. Every function raises `ProtocolViolation`, and nothing else, on a malformed line.

Words `name=value` that are not known here are kept or ignored, never refused: servers may add words.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coli_client.errors import ProtocolViolation, RequestEnded, ServerError, server_error
from coli_client.results import Ack, Chunk, Info, Logprob, Result, Score, Session, StatLine, Stats, Version

_WORD = re.compile(r"(?<!\S)([a-z][a-z0-9_]*)=(\S+)")
_DECODER = json.JSONDecoder()
_MAX_QUOTED = 200
_WHOLE = ("seed", "lookups", "route_swaps", "route_slots")
_REAL = ("ttft_ms", "tok_s", "hit_pct", "swap_pct", "route_agree", "route_kl")
_LINE = ("tokens", "tok_s", "hit_pct", "rss_gb", "prompt_tokens", "length_limited")
_LINE_WORDS = frozenset({"swap_pct", "route_swaps", "route_slots", "route_agree", "route_kl"})


def violation(problem: str, line: str) -> ProtocolViolation:
    """The error for a line that should not have come; a long line is quoted in part."""
    quoted = repr(line[:_MAX_QUOTED]) + ("..." if len(line) > _MAX_QUOTED else "")
    return ProtocolViolation(f"{problem}: {quoted}")


def words(text: str) -> dict[str, str]:
    """The `name=value` words of `text`; of a name given twice the first counts."""
    found: dict[str, str] = {}
    for name, value in _WORD.findall(text):
        found.setdefault(name, value)
    return found


def ack(line: str, id: str, rest: str) -> Ack:
    fields = words(rest)
    return Ack(id, _int(line, fields, "prompt_tokens"), fields.get("session", ""))


def info(id: str, rest: str) -> Info:
    return Info(id, words(rest))


def chunk(line: str, id: str, rest: str) -> Chunk:
    text, end = _json(line, rest, 0)
    if not isinstance(text, str):
        raise violation("TOK must carry a JSON string", line)
    logprobs: tuple[Logprob, ...] = ()
    while rest[end : end + 1] in (" ", "\t"):
        end += 1
    if rest[end : end + 1] == "[":
        logprobs = _logprobs(line, _json(line, rest, end)[0])
    return Chunk(id, text, logprobs)


def error(line: str) -> ServerError:
    """`ERR <CODE> [id=<id>] [name=value ...] <message>`: words before the message become fields."""
    _, _, rest = line.partition(" ")
    code, _, rest = rest.partition(" ")
    if not code:
        raise violation("ERR without a code", line)
    fields: dict[str, str] = {}
    while found := _WORD.match(rest):
        fields.setdefault(found[1], found[2])
        rest = rest[found.end() :].lstrip(" ")
    return server_error(code, rest, fields.pop("id", None), fields)


def result(line: str, id: str, rest: str) -> Result:
    """The figures of a `DONE` line; text and session are not on it and are left empty."""
    fields = words(rest)
    if "finish" not in fields:
        raise violation("DONE without finish=", line)
    figures: dict[str, Any] = {name: _int(line, fields, name) for name in _WHOLE if name in fields}
    figures |= {name: _float(line, fields, name) for name in _REAL if name in fields}
    return Result(
        id=id,
        text="",
        finish=fields["finish"],
        tokens=_int(line, fields, "tokens"),
        prompt_tokens=_int(line, fields, "prompt_tokens"),
        mode=fields.get("mode"),
        scope=fields.get("scope"),
        fields=fields,
        **figures,
    )


def score(result: Result) -> Score:
    """The score in the `DONE` line of a SCORE; raises `RequestEnded` where it ended without one."""
    line, fields = f"DONE {result.id}", result.fields
    if "logprob" not in fields:
        raise RequestEnded(f"request {result.id} ended without a score: finish={result.finish}")
    if fields.get("greedy") not in ("0", "1"):
        raise violation("greedy= must be 0 or 1", line)
    logprob = _float(line, fields, "logprob")
    return Score(result.id, logprob, result.tokens, fields["greedy"] == "1", result.prompt_tokens, fields)


def expect(word: str) -> Callable[[Sequence[str]], None]:
    """A parser for replies of one line that say no more than `word`."""

    def parse(lines: Sequence[str]) -> None:
        _first(lines, word)

    return parse


def version(lines: Sequence[str]) -> Version:
    line = lines[0]
    number, _, rest = _first(lines, "VERSION").partition(" ")
    if not number:
        raise violation("VERSION without a number", line)
    return Version(number, _int(line, words(rest), "protocol"))


def session(lines: Sequence[str]) -> Session:
    fields = words(_first(lines, "OK"))
    if "session" not in fields:
        raise violation("the answer to SESSION does not name it", lines[0])
    return Session(fields["session"], fields.get("new") == "1")


def text(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def stats(lines: Sequence[str]) -> Stats:
    figures = Stats()
    for line in lines:
        name, _, value = _first((line,), "STAT").partition(" ")
        if not name:
            raise violation("STAT without a name", line)
        figures[name] = value
    return figures


def stat_line(lines: Sequence[str]) -> StatLine:
    line = lines[0]
    values = _first(lines, "STAT").split()
    if len(values) < len(_LINE):
        raise violation(f"STAT line must begin with {len(_LINE)} figures", line)
    fixed = dict(zip(_LINE, values, strict=False))
    fields = words(line)
    optional: dict[str, Any] = {n: _int(line, fields, n) for n in _WHOLE if n in fields and n in _LINE_WORDS}
    optional |= {n: _float(line, fields, n) for n in _REAL if n in fields and n in _LINE_WORDS}
    return StatLine(
        tokens=_int(line, fixed, "tokens"),
        tok_s=_float(line, fixed, "tok_s"),
        hit_pct=_float(line, fixed, "hit_pct"),
        rss_gb=_float(line, fixed, "rss_gb"),
        prompt_tokens=_int(line, fixed, "prompt_tokens"),
        length_limited=_int(line, fixed, "length_limited") != 0,
        **optional,
    )


def _first(lines: Sequence[str], word: str) -> str:
    """What follows `word` on the only line; another first word is a violation."""
    first, _, rest = lines[0].partition(" ")
    if first != word:
        raise violation(f"expected {word}", lines[0])
    return rest


def _int(line: str, fields: Mapping[str, str], name: str) -> int:
    value = fields.get(name, "")
    # Figures fit 64 bits; the bound keeps int() from refusing absurdly long digits in its own way.
    if not (value.isascii() and value.isdigit() and len(value) <= 20):
        raise violation(f"{name}= must be a whole number", line)
    return int(value)


def _float(line: str, fields: Mapping[str, str], name: str) -> float:
    try:
        number = float(fields[name])
    except ValueError:
        raise violation(f"{name}= must be a number", line) from None
    if not math.isfinite(number):
        raise violation(f"{name}= must be finite", line)
    return number


def _logprobs(line: str, values: Any) -> tuple[Logprob, ...]:
    try:
        return tuple(_logprob(value, value.get("top", ())) for value in values)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise violation("malformed log-probabilities", line) from None


def _logprob(value: Any, top: Any = ()) -> Logprob:
    return Logprob(
        operator.index(value["id"]),
        str(value["text"]),
        float(value["logprob"]),
        tuple(_logprob(candidate) for candidate in top),
    )


def _json(line: str, text: str, start: int) -> tuple[Any, int]:
    """One JSON value of `text` at `start`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # RecursionError: brackets nested without end
        raise violation("not JSON", line) from None
