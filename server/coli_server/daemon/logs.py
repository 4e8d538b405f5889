"""What the daemon writes on standard error: lines of text or JSON objects, and one line for each request.

No text of a client is ever logged unless `--log-prompts` asks for it, and no token at all.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

Field = str | int | float | None

access_log = logging.getLogger("coli.access")


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message name=value ...`, one line, then a traceback if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        fields = _fields(record).items()
        words = [f"{name}={_word(value)}" for name, value in fields if value is not None]
        return " ".join([super().formatMessage(record), *words])


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `time` (UTC), `level`, `logger`, `message`, figures, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Field] = {
            "time": f"{moment}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((name, value) for name, value in _fields(record).items() if value is not None)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up(level: str, style: str) -> None:
    """Send all messages of at least `level` to standard error, in `style` text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_level(level: str) -> None:
    """Log messages of at least `level` from now on."""
    logging.getLogger().setLevel(level.upper())


def access(fields: Mapping[str, Field]) -> None:
    """Write the line of a request that is over."""
    access_log.info("request over", extra={"fields": fields})


def _fields(record: logging.LogRecord) -> Mapping[str, Field]:
    fields: Mapping[str, Field] = getattr(record, "fields", {})
    return fields


def _word(value: Field) -> str:
    """A value without blanks or quotes stands as it is, any other as a JSON string."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    plain = text and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=True)
