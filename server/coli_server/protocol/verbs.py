"""Every verb of the protocol once: its shape, its usage and its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Shape = Literal["words", "text", "json", "assignment"]

STAT_SECTIONS: Final = (
    "all",
    "server",
    "route",
    "cache",
    "latency",
    "settings",
    "session",
    "sessions",
    "line",
    "reset",
)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `shape` is what follows its option words: some words, a free text, a JSON object, or a
    name and a value.

    `least` and `most` bound the number of words of a verb of shape "words".
    """

    name: str
    usage: str
    help: str
    reply: str
    shape: Shape = "words"
    least: int = 0
    most: int = 0
    aliases: tuple[str, ...] = ()


_TABLE: Final = (
    Verb("PING", "PING", "is the server there?", "PONG"),
    Verb("VERSION", "VERSION", "version of the server and of the protocol", "VERSION <x.y.z> protocol=1"),
    Verb("HELP", "HELP [verb]", "this list, or one verb with its options", "lines of text, END", most=1),
    Verb(
        "STAT",
        "STAT [section]",
        f"figures; sections: {', '.join(STAT_SECTIONS)}; `session` may be followed by an id",
        "STAT <name> <value> lines, END",
        most=2,
        aliases=("STATS",),
    ),
    Verb("AUTH", "AUTH <token>", "say who you are, where tokens are asked for", "OK", least=1, most=1),
    Verb(
        "SESSION",
        "SESSION <id>",
        "attach this connection to the session with this name",
        "OK session=<id> new=<0 or 1>",
        least=1,
        most=1,
    ),
    Verb(
        "SET",
        "SET <option> <value>",
        "keep an option for this session",
        "OK",
        shape="assignment",
    ),
    Verb(
        "GEN",
        "GEN [option=value ...] <prompt>",
        "continue a text",
        "ACK, TOK lines, DONE",
        shape="text",
    ),
    Verb(
        "CHAT",
        "CHAT [option=value ...] <text>",
        "one turn of this session's dialogue",
        "ACK, TOK lines, DONE",
        shape="text",
    ),
    Verb(
        "SCORE",
        'SCORE [option=value ...] {"context": ..., "continuation": ...}',
        "how likely a text is after another one, by stock routing unless an option says otherwise",
        "ACK, DONE <id> logprob=<nats> tokens=<n> greedy=<0 or 1>",
        shape="json",
    ),
    Verb("CANCEL", "CANCEL <id>", "end a running request of this session", "OK", least=1, most=1),
    Verb("RESET", "RESET", "forget this session's dialogue; figures stay", "OK"),
    Verb("QUIT", "QUIT", "end the connection", "OK bye"),
)

VERBS: Final[Mapping[str, Verb]] = MappingProxyType({verb.name: verb for verb in _TABLE})
_BY_WORD: Final[Mapping[str, Verb]] = MappingProxyType(
    {word: verb for verb in _TABLE for word in (verb.name, *verb.aliases)}
)


def find_verb(word: str) -> Verb | None:
    """The verb that `word` spells in any mixture of ASCII cases, or None."""
    # str.upper() turns other scripts' letters into ASCII ones: a long s would spell STAT.
    return _BY_WORD.get(word.upper()) if word.isascii() else None
