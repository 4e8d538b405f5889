"""Show the figures of a running daemon. docs/STAT.md explains every one of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from coli_client import Client, ConnectionLost
from coli_server.cli.arguments import (
    add_connect_argument,
    client_of,
    daemon_address,
    make_parser,
    refusals,
)
from coli_server.errors import ConfigurationError
from coli_server.ranges import NumberRange

_SECTIONS = "all, server, route, cache, latency, settings, session, sessions"
_INTERVAL = NumberRange(0.1, 86_400)


def main(words: Sequence[str]) -> int:
    parser = make_parser("stat", __doc__)
    parser.add_argument(
        "section", nargs="?", default="all", help=f"one of {_SECTIONS} (all); reset starts a new window"
    )
    parser.add_argument("session", nargs="?", metavar="id", help="of a session, after the section 'session'")
    parser.add_argument("--json", action="store_true", help="one JSON object; numbers as numbers")
    parser.add_argument(
        "--watch",
        nargs="?",
        const="2",
        metavar="SECONDS",
        help="again and again (every 2 seconds), over restarts of the daemon; with --json one object a line",
    )
    add_connect_argument(parser)
    arguments = parser.parse_args(words)
    address = daemon_address(arguments)
    interval = None if arguments.watch is None else _interval(arguments.watch)
    if arguments.section == "reset":
        with client_of(address) as client:
            client.stat_reset()
        return 0
    with client_of(address) as client:
        if interval is None:
            figures = _ask(client, arguments.section, arguments.session)
            print(_as_json(figures, indent=2) + "\n" if arguments.json else aligned(figures), end="")
        else:
            _watch(client, arguments.section, arguments.session, interval, arguments.json)
    return 0


def _interval(word: str) -> float:
    try:
        return float(_INTERVAL.parse(word))
    except ValueError:
        raise ConfigurationError(f"--watch is {word!r}, must be {_INTERVAL}") from None


def _watch(client: Client, section: str, session: str | None, interval: float, as_json: bool) -> None:
    """Print the figures until Ctrl-C. A first connection must succeed; a lost one is made again."""
    separator = ""
    while True:
        try:
            client.connect()
            figures = _ask(client, section, session)
        except ConnectionLost as error:
            if not separator:
                raise
            print(f"coli: {error}; trying again", file=sys.stderr, flush=True)
        else:
            text = _as_json(figures) + "\n" if as_json else separator + aligned(figures)
            print(text, end="", flush=True)
            # A terminal shows the newest figures alone.
            separator = "\x1b[H\x1b[2J" if sys.stdout.isatty() else "\n"
        time.sleep(interval)


def _ask(client: Client, section: str, session: str | None) -> Mapping[str, str]:
    with refusals():
        return client.stat(section, session)


def aligned(figures: Mapping[str, str]) -> str:
    """A line for each figure, the values below one another."""
    width = max(map(len, figures), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in figures.items())


def _as_json(figures: Mapping[str, str], indent: int | None = None) -> str:
    return json.dumps({name: _plain(value) for name, value in figures.items()}, indent=indent)


def _plain(value: str) -> int | float | str | None:
    if value == "-":
        return None
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value
