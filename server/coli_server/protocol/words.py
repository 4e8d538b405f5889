"""The lexical grammar: a command line cut into verb, option words and rest.

    line   = blanks [verb] *(blanks option) [blanks rest]
    option = name "=" ( quoted / *nonblank )          name = [a-z][a-z0-9_]*
    quoted = a JSON string that a blank or the end of the line follows

Options stand before the rest: the first word that is no option begins it. `--` begins it too, and is
dropped with one blank after it. All of it works on bytes, because a line that is not UTF-8 may still
declare a payload, and that must be found or the payload would be read as commands.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, Literal

Declared = Literal["yes", "no", "unknown"]

BLANKS: Final = " \t"

_SPACES = re.compile(rb"[ \t]*")
_WORD = re.compile(rb"[^ \t]*")
_NAME = re.compile(rb"([a-z][a-z0-9_]*)=")
_QUOTED = re.compile(rb'"(?:[^"\\]++|\\.)*+"(?=[ \t]|\Z)', re.DOTALL)
_DASHES = re.compile(rb"--(?=[ \t]|\Z)")
_UNFINISHED = re.compile(rb"[a-z][a-z0-9_]*|--?")

PAYLOAD_WORD: Final = re.compile(rb"[ \t]bytes=")
"""What may declare a payload where the grammar can no longer tell options from text."""


@dataclass(frozen=True, slots=True)
class Words:
    """A line (without its line end) and what it is made of, still undecoded.

    `verb` is empty when the line begins with an option. `options` are name and raw value (quotes included)
    in order of appearance. `rest` is everything after them. `broken` is not None when an option's quoted
    value is malformed: it is the line from that option on, where no boundary is certain any more.
    """

    line: bytes
    verb: bytes
    options: tuple[tuple[str, bytes], ...]
    rest: bytes
    dashed: bool = False
    broken: bytes | None = None

    def values(self, name: str) -> list[bytes]:
        """The raw values of every option called `name`."""
        return [value for known, value in self.options if known == name]


def split(line: bytes) -> Words:
    """Cut a line into words, in time linear in its length."""
    position = _skip(line, 0)
    verb = b""
    if not _NAME.match(line, position):
        verb = _match(_WORD, line, position)
        position = _skip(line, position + len(verb))
    options: list[tuple[str, bytes]] = []
    while name := _NAME.match(line, position):
        value_at = name.end()
        if line[value_at : value_at + 1] == b'"':
            quoted = _QUOTED.match(line, value_at)
            if quoted is None:
                return Words(line, verb, tuple(options), b"", broken=line[position:])
            value = quoted[0]
        else:
            value = _match(_WORD, line, value_at)
        options.append((name[1].decode("ascii"), value))
        position = _skip(line, value_at + len(value))
    if _DASHES.match(line, position):
        return Words(line, verb, tuple(options), line[position + 3 :], dashed=True)
    return Words(line, verb, tuple(options), line[position:])


def declares_payload(prefix: bytes) -> Declared:
    """Whether a line that begins with `prefix` (and goes on) declares a payload."""
    words = split(prefix)
    if words.values("bytes"):
        return "yes"
    if words.dashed and words.rest:
        return "no"
    if words.rest and not _UNFINISHED.fullmatch(words.rest):
        return "no"
    return "yes" if PAYLOAD_WORD.search(prefix) else "unknown"


def quote(word: str, limit: int = 40) -> str:
    """`word` for an error message: in quotes, ASCII only, on one line and not too long."""
    return json.dumps(word if len(word) <= limit else word[:limit] + "...")


def _match(pattern: re.Pattern[bytes], line: bytes, position: int) -> bytes:
    found = pattern.match(line, position)
    return found[0] if found else b""


def _skip(line: bytes, position: int) -> int:
    found = _SPACES.match(line, position)
    return found.end() if found else position
