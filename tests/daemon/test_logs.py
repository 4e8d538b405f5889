"""Lines of the log: one for each message, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys

from coli_server.daemon.logs import JsonFormatter, TextFormatter


def record(fields: dict[str, object] | None = None, *, failed: bool = False) -> logging.LogRecord:
    information = None
    if failed:
        try:
            raise RuntimeError("why")
        except RuntimeError:
            information = sys.exc_info()
    made = logging.LogRecord("coli.x", logging.INFO, __file__, 1, "it is %s", ("so",), information)
    if fields is not None:
        made.fields = fields
    return made


def test_a_line_of_text_has_the_figures_as_words() -> None:
    fields = {"request": 7, "owner": None, "total_ms": 12.3456, "prompt": 'two\nlines "q"', "empty": ""}
    line = TextFormatter().format(record(fields))
    assert line.endswith(
        r'INFO coli.x: it is so request=7 total_ms=12.346 prompt="two\nlines \"q\"" empty=""'
    )
    assert "\n" not in line


def test_a_line_of_json_is_an_object_with_a_time_in_utc() -> None:
    line = JsonFormatter().format(record({"request": 7, "prompt": "two\nlines", "owner": None}, failed=True))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("traceback").startswith("Traceback")
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "coli.x",
        "message": "it is so",
        "request": 7,
        "prompt": "two\nlines",
    }
