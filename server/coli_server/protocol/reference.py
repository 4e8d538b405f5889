"""The reference part of the protocol's document, made from the tables that the parser itself uses."""

from __future__ import annotations

from collections.abc import Iterable

from coli_server.protocol.errors import CODES, Closes
from coli_server.protocol.options import OPTIONS, Option
from coli_server.protocol.verbs import VERBS
from coli_server.ranges import ROUTING, Choices

_CLOSES: dict[Closes, str] = {"never": "no", "sometimes": "see there", "always": "yes"}


def markdown() -> str:
    """Commands, options and errors as Markdown tables."""
    commands = _table(
        ("command", "meaning", "reply"),
        ((f"`{verb.usage}`", verb.help, f"`{verb.reply}`") for verb in VERBS.values()),
    )
    options = _table(
        ("option", "value", "default", "of", "`SET`", "meaning"),
        (
            (
                f"`{option.name}`",
                option.range_text,
                _default(option),
                ", ".join(option.verbs) or "every command",
                "yes" if option.settable else "no",
                option.help,
            )
            for option in OPTIONS.values()
        ),
    )
    errors = _table(
        ("code", "when", "closes"),
        ((f"`{code}`", info.when, _CLOSES[info.closes]) for code, info in CODES.items()),
    )
    return f"### Commands\n\n{commands}\n### Options\n\n{options}\n### Errors\n\n{errors}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def _default(option: Option) -> str:
    if option.name in ROUTING:
        return "the daemon's setting"
    if option.default in (None, (), ""):
        return "none"
    if isinstance(option.accepts, Choices):
        return next(f"`{word}`" for word, value in option.accepts.values if value is option.default)
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"
