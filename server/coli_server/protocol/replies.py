"""Every line that the server sends, as bytes that end in LF. Nothing that goes in can add a line.

A reply of several lines is one block of bytes, so that nothing can come between its lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coli_server.protocol.errors import CODES, CodeInfo
from coli_server.protocol.options import OPTIONS, Option
from coli_server.protocol.verbs import VERBS, Verb

PROTOCOL_VERSION: Final = 1

PONG: Final = b"PONG\n"
OK: Final = b"OK\n"
BYE: Final = b"OK bye\n"
RESET: Final = b"RESET\n"

_MAX_MESSAGE: Final = 1000

# C0 and C1 controls and DEL, Unicode's own line ends (str.splitlines and JavaScript obey them), and
# halves of surrogate pairs, which have no UTF-8.
_CONTROLS: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_OR_BLANK = re.compile(rf"[\s{_CONTROLS}]+")

# Codes come here from error classes all over the server, so as plain strings.
_CODES: Final[Mapping[str, CodeInfo]] = {str(code): info for code, info in CODES.items()}
_KEY_WORD = re.compile(r"[a-z][a-z0-9_]*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router's meters say of one request. Agreement and KL are None where they are not measured."""

    swap_pct: float
    swaps: int
    slots: int
    agree: float | None
    kl: float | None

    def words(self) -> str:
        words = f"swap_pct={self.swap_pct:.1f} route_swaps={self.swaps} route_slots={self.slots}"
        if self.agree is not None:
            words += f" route_agree={self.agree:.1f}"
        if self.kl is not None:
            words += f" route_kl={self.kl:.4f}"
        return words


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a DONE line. `ttft_ms` is 0 when no token came; percentages are 0 to 100."""

    finish: str
    tokens: int
    prompt_tokens: int
    seed: int
    ttft_ms: float
    tok_s: float
    hit_pct: float
    lookups: int
    routing: Routing
    mode: str
    scope: str


def version(release: str) -> bytes:
    return _line(f"VERSION {_word(release)} protocol={PROTOCOL_VERSION}")


def session(id: str, *, new: bool) -> bytes:
    return _line(f"OK session={_word(id)} new={int(new)}")


def ack(id: str, *, prompt_tokens: int, session: str) -> bytes:
    return _line(f"ACK {_word(id)} prompt_tokens={prompt_tokens} session={_word(session)}")


def prefill(id: str, *, done: int, total: int) -> bytes:
    """INFO: `done` of `total` prompt tokens have been read."""
    return _line(f"INFO {_word(id)} prefill={done}/{total}")


def queued(id: str, *, place: int) -> bytes:
    """INFO: the request's place in the queue, 1 for the next to start."""
    return _line(f"INFO {_word(id)} queue={place}")


def generating(id: str, *, tokens: int) -> bytes:
    """INFO: this many tokens have been made; sent when there is no text to send."""
    return _line(f"INFO {_word(id)} tokens={tokens}")


def token(id: str, text: str, logprobs: object = None) -> bytes:
    """TOK: some complete characters, and with `logprobs` a second word, that value as JSON without blanks."""
    line = f"TOK {_word(id)} {json_word(text)}"
    if logprobs is not None:
        line += f" {json_word(logprobs)}"
    return _line(line)


def done(id: str, summary: Summary) -> bytes:
    words = [
        f"DONE {_word(id)}",
        f"finish={_word(summary.finish)}",
        f"tokens={summary.tokens}",
        f"prompt_tokens={summary.prompt_tokens}",
        f"seed={summary.seed}",
        f"ttft_ms={summary.ttft_ms:.1f}",
        f"tok_s={summary.tok_s:.2f}",
        f"hit_pct={summary.hit_pct:.1f}",
        f"lookups={summary.lookups}",
        summary.routing.words(),
        f"mode={_word(summary.mode)}",
        f"scope={_word(summary.scope)}",
    ]
    return _line(" ".join(words))


def scored(
    id: str,
    *,
    logprob: float | None,
    tokens: int,
    greedy: bool,
    finish: str,
    prompt_tokens: int,
    hit_pct: float,
    lookups: int,
    routing: Routing,
    mode: str,
    scope: str,
) -> bytes:
    """DONE of a SCORE. `logprob` is exact (it reads back as the same float64), None where none is."""
    words = [f"DONE {_word(id)}"]
    if logprob is not None:
        words.append(f"logprob={logprob!r}")
    words.append(f"tokens={tokens}")
    if logprob is not None:
        words.append(f"greedy={int(greedy)}")
    words += [
        f"finish={_word(finish)}",
        f"prompt_tokens={prompt_tokens}",
        f"hit_pct={hit_pct:.1f}",
        f"lookups={lookups}",
        routing.words(),
        f"mode={_word(mode)}",
        f"scope={_word(scope)}",
    ]
    return _line(" ".join(words))


def error(
    code: str,
    message: str,
    *,
    id: str | None = None,
    details: Mapping[str, int] | None = None,
) -> bytes:
    """ERR: always one line. Raises ValueError for a code that is not in the table."""
    info = _CODES.get(code)
    if info is None:
        raise ValueError(f"{code!r} is no error code of the protocol")
    words = ["ERR", code]
    if id is not None:
        words.append(f"id={_word(id)}")
    words += [f"{_word(name)}={value}" for name, value in (details or {}).items()]
    text = _UNSAFE.sub(" ", message[:_MAX_MESSAGE]).strip() or info.when
    # A message may quote anything: it must not look like one of the words that stand before it.
    words.append(f"refused: {text}" if _KEY_WORD.match(text) else text)
    return _line(" ".join(words))


def stat(figures: Iterable[tuple[str, object]]) -> bytes:
    """`STAT <name> <value>` lines, then END. Blanks inside a value become `_`."""
    return b"".join(_line(f"STAT {_word(name)} {_word(value)}") for name, value in figures) + b"END\n"


def stat_line(
    *,
    tokens: int,
    tok_s: float,
    hit_pct: float,
    rss_gb: float,
    prompt_tokens: int,
    length_limited: bool,
    routing: Routing | None,
) -> bytes:
    """`STAT line`: one line of figures by position, and the routing words when routing is on."""
    line = f"STAT {tokens} {tok_s:.2f} {hit_pct:.1f} {rss_gb:.2f} {prompt_tokens} {int(length_limited)}"
    return _line(line if routing is None else f"{line} {routing.words()}")


def help_text(topic: str | None = None) -> bytes:
    """HELP: all verbs, or the one called `topic` (its canonical name) with its options; then END."""
    lines = _all_verbs() if topic is None else _one_verb(VERBS[topic])
    return b"".join(_line(line) for line in lines) + b"END\n"


def json_word(value: object) -> str:
    """`value` as JSON on one line, without blanks outside strings, safe to encode and to split into lines.

    Raises ValueError for a number that JSON has not (infinities and NaN).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def with_newline(block: bytes, newline: bytes) -> bytes:
    """`block` with every line ended by `newline`, for clients that end their own lines so."""
    return block if newline == b"\n" else block.replace(b"\n", newline)


def _all_verbs() -> list[str]:
    width = max(len(verb.usage) for verb in VERBS.values())
    lines = [f"{verb.usage:<{width}}  {verb.help}" for verb in VERBS.values()]
    return [*lines, "HELP <verb> tells more. Everything is explained in docs/PROTOCOL.md."]


def _one_verb(verb: Verb) -> list[str]:
    lines = [verb.usage, f"  {verb.help}", f"  answers: {verb.reply}"]
    if verb.aliases:
        lines.append(f"  also: {', '.join(verb.aliases)}")
    options = [option for option in OPTIONS.values() if _applies(option, verb)]
    width = max((len(option.name) for option in options), default=0)
    return lines + [f"  {option.name:<{width}}  {option.help} ({option.range_text})" for option in options]


def _applies(option: Option, verb: Verb) -> bool:
    if verb.shape == "assignment":
        return option.settable
    return verb.name in option.verbs or (verb.shape in ("text", "json") and option.name == "bytes")


def _word(value: object) -> str:
    """`value` as one word: no blank or control character, never empty."""
    return _UNSAFE_OR_BLANK.sub("_", str(value)) or "-"


def _line(text: str) -> bytes:
    return text.encode() + b"\n"
