"""What a client asked for, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coli_server.protocol.options import OptionValue

ScorePart = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreText:
    """What SCORE scores: `continuation` behind `context`, both texts or both token ids."""

    context: ScorePart
    continuation: ScorePart


@dataclass(frozen=True, slots=True)
class Command:
    """One command whose words, ranges and text have all been checked.

    `verb` is the canonical upper-case name (`STATS` is `STAT`). `options` maps option names to typed values
    (`stop` to a tuple of strings), without `id` and `bytes`; for SET it holds the one option that is set.
    `arguments` are the words of the verbs that take words. `text` is the prompt of GEN or the turn of CHAT,
    decoded; with `ids=1` it is empty and `token_ids` holds the prompt instead. `score` is what SCORE asks
    for. `size` is the bytes of the line and its payload, for whoever bounds how much may wait; it does not
    count when commands are compared.
    """

    verb: str
    id: str | None = None
    options: Mapping[str, OptionValue] = field(default_factory=lambda: MappingProxyType({}))
    arguments: tuple[str, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    score: ScoreText | None = None
    size: int = field(default=0, compare=False)
