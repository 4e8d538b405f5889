"""From the words of one line, and its payload if it declared one, to a checked `Command`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from coli_server.protocol.commands import Command, ScorePart, ScoreText
from coli_server.protocol.errors import ProtocolError
from coli_server.protocol.options import (
    IDENTIFIER_RULE,
    MAX_STOPS,
    Option,
    OptionValue,
    find_option,
    is_identifier,
    is_token_id,
    parse_token_ids,
    parse_value,
)
from coli_server.protocol.verbs import STAT_SECTIONS, Verb, find_verb
from coli_server.protocol.words import BLANKS, Words, quote

_BLANK_RUN = re.compile(f"[{BLANKS}]+")


def parse(words: Words, payload: bytes | None = None) -> Command:
    """The command that `words` and the bytes of its payload spell.

    Raises ProtocolError, which never closes the connection: the caller has already kept its place. The error
    carries the request's id when the line names a valid one.
    """
    try:
        return replace(_parse(words, payload), size=len(words.line) + len(payload or b""))
    except ProtocolError as error:
        error.id = request_id(words)
        raise


def _parse(words: Words, payload: bytes | None) -> Command:
    line = _utf8(words.line, "line")
    if "\0" in line:
        raise ProtocolError("BAD_REQUEST", "a NUL byte in the line; write it as a JSON string or send bytes=")
    if not words.verb:
        raise ProtocolError("BAD_REQUEST", "the line begins with an option instead of a verb")
    verb = find_verb(words.verb.decode())
    if verb is None:
        raise ProtocolError("UNKNOWN_VERB", f"unknown verb {quote(words.verb.decode())}; try HELP")
    if words.broken is not None:
        name = words.broken.partition(b"=")[0].decode()
        raise ProtocolError("BAD_OPTION", f"option {name}: its JSON string must end before the next blank")
    options = _options(verb, words)
    rest = words.rest.decode()
    body = None if payload is None else _utf8(payload, "payload")
    match verb.shape:
        case "words":
            return _words_command(verb, rest, body)
        case "assignment":
            return _assignment_command(verb, rest, body)
        case "text":
            return _text_command(verb, options, rest, body)
        case "json":
            return _score_command(verb, options, rest, body)


def _words_command(verb: Verb, rest: str, body: str | None) -> Command:
    if body is not None:
        raise ProtocolError("BAD_REQUEST", f"{verb.name} takes no payload")
    arguments = tuple(word for word in _BLANK_RUN.split(rest) if word)
    if not verb.least <= len(arguments) <= verb.most:
        raise ProtocolError("BAD_REQUEST", f"usage: {verb.usage}")
    return Command(verb.name, arguments=_check_arguments(verb, arguments))


def _check_arguments(verb: Verb, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of a verb of shape "words", in canonical form."""
    match verb.name, arguments:
        case (("SESSION" | "CANCEL"), (name,)) if not is_identifier(name):
            raise ProtocolError("BAD_REQUEST", f"an id must be {IDENTIFIER_RULE}, not {quote(name)}")
        case "STAT", (section, *names):
            return _stat_arguments(section.lower(), names)
        case "HELP", (word,):
            topic = find_verb(word)
            if topic is None:
                raise ProtocolError("UNKNOWN_VERB", f"unknown verb {quote(word)}; try HELP")
            return (topic.name,)
    return arguments


def _stat_arguments(section: str, names: list[str]) -> tuple[str, ...]:
    if section not in STAT_SECTIONS:
        raise ProtocolError(
            "BAD_REQUEST", f"unknown section {quote(section)}; the sections are {', '.join(STAT_SECTIONS)}"
        )
    if names and section != "session":
        raise ProtocolError("BAD_REQUEST", f"STAT {section} takes no further word")
    for name in names:
        # Anonymous sessions have names of this form: they can be looked at, though not attached to.
        if not is_identifier(name.removeprefix("~")):
            raise ProtocolError("BAD_REQUEST", f"an id must be {IDENTIFIER_RULE}, not {quote(name)}")
    return (section, *names)


def _assignment_command(verb: Verb, rest: str, body: str | None) -> Command:
    name, *values = _BLANK_RUN.split(rest, maxsplit=1)
    value = "".join(values)
    if not name:
        raise ProtocolError("BAD_REQUEST", f"usage: {verb.usage}")
    option = find_option(name)
    if not option.settable:
        raise ProtocolError("BAD_OPTION", f"option {name} belongs to one request and cannot be kept with SET")
    if body is not None and value:
        raise ProtocolError("BAD_REQUEST", "a value on the line and a payload as well")
    if body is None:
        if not value:
            raise ProtocolError("BAD_REQUEST", f"usage: {verb.usage}")
        body = _decode_text(value if option.accepts is None else value.rstrip(BLANKS))
    if name == "stop":
        # Without this there would be no way to take the session's stop text back.
        return Command(verb.name, options=_frozen({name: (body,) if body else ()}))
    return Command(verb.name, options=_frozen({name: parse_value(option, body)}))


def _text_command(verb: Verb, options: dict[str, OptionValue], rest: str, body: str | None) -> Command:
    text = _only_text(verb, _decode_text(rest) if body is None else rest, body)
    token_ids = None
    if options.pop("ids", False):
        token_ids, text = parse_token_ids(text), ""
    id = _pop_id(options)
    return Command(verb.name, id=id, options=_frozen(options), text=text, token_ids=token_ids)


def _score_command(verb: Verb, options: dict[str, OptionValue], rest: str, body: str | None) -> Command:
    try:
        value = json.loads(_only_text(verb, rest, body), object_pairs_hook=_distinct)
    except (ValueError, RecursionError):  # RecursionError: brackets nested without end
        value = None
    if not isinstance(value, dict) or value.keys() != {"context", "continuation"}:
        raise ProtocolError("BAD_REQUEST", f"no such JSON object; usage: {verb.usage}")
    context, continuation = (_score_part(name, value[name]) for name in ("context", "continuation"))
    if type(context) is not type(continuation):
        raise ProtocolError("BAD_REQUEST", "context and continuation must both be texts or both token ids")
    if not continuation:
        raise ProtocolError("BAD_REQUEST", "the continuation is empty")
    id = _pop_id(options)
    return Command(verb.name, id=id, options=_frozen(options), score=ScoreText(context, continuation))


def _score_part(name: str, value: object) -> ScorePart:
    """A text, or token ids as a tuple."""
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list) and all(map(is_token_id, value)):
        return tuple(value)
    raise ProtocolError("BAD_REQUEST", f"{name} must be a string or a list of token ids")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; ValueError for a name given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _only_text(verb: Verb, rest: str, body: str | None) -> str:
    """The text of a command, which stands on the line or in the payload."""
    if body is not None and rest:
        raise ProtocolError("BAD_REQUEST", "a text on the line and a payload as well")
    text = rest if body is None else body
    if not text:
        raise ProtocolError("BAD_REQUEST", f"empty text; usage: {verb.usage}")
    return text


def _pop_id(options: dict[str, OptionValue]) -> str | None:
    id = options.pop("id", None)
    return id if isinstance(id, str) else None


def _options(verb: Verb, words: Words) -> dict[str, OptionValue]:
    """Typed values of the line's option words; `bytes` is left out."""
    values: dict[str, OptionValue] = {}
    stops: list[str] = []
    hint = "; put -- before a text that begins like one" if verb.shape == "text" else ""
    for name, raw in words.options:
        option = find_option(name, hint)
        if name == "bytes":
            continue
        if verb.name not in option.verbs:
            raise ProtocolError("BAD_OPTION", f"{verb.name} takes no option {name}; usage: {verb.usage}")
        value = parse_value(option, _decode_value(option, raw.decode()))
        if name == "stop":
            stops.append(str(value))
        elif name in values:
            raise ProtocolError("BAD_OPTION", f"option {name} is given twice")
        else:
            values[name] = value
    if len(stops) > MAX_STOPS:
        raise ProtocolError("BAD_OPTION", f"option stop is given {len(stops)} times; at most {MAX_STOPS}")
    if stops:
        values["stop"] = tuple(stops)
    return values


def _decode_value(option: Option, word: str) -> str:
    if not word.startswith('"'):
        return word
    value = _json_string(word)
    if value is None:
        raise ProtocolError("BAD_OPTION", f"option {option.name}: {quote(word)} is no JSON string")
    return value


def _decode_text(text: str) -> str:
    """A text that is wholly one JSON string is decoded; any other stays as it is."""
    value = _json_string(text) if len(text) > 1 and text[0] == text[-1] == '"' else None
    return text if value is None else value


def _json_string(word: str) -> str | None:
    """The string that `word` spells in JSON, or None.

    Raises ProtocolError BAD_UTF8 for half of a surrogate pair: it has no UTF-8, no tokenizer could take it.
    """
    try:
        value: str = json.loads(word)
    except ValueError:
        return None
    return _encodable(value)


def _encodable(text: str) -> str:
    """`text` as it is; raises ProtocolError BAD_UTF8 for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProtocolError("BAD_UTF8", "half a surrogate pair in a JSON string") from None
    return text


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("BAD_UTF8", f"the {what} is not UTF-8 at byte {error.start}") from None


def request_id(words: Words) -> str | None:
    """The id that a refused line gave its request, so that its `ERR` can be told from others'."""
    for raw in words.values("id"):
        word = raw.decode(errors="replace")
        if is_identifier(word):
            return word
    return None


def _frozen(options: dict[str, OptionValue]) -> Mapping[str, OptionValue]:
    return MappingProxyType(options)
