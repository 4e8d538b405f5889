"""Show the figures of a running daemon. docs/STAT.md explains every one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from coli_server.cli.arguments import client_of, connect_address, make_parser, refusals
from coli_server.settings import SETTINGS

_SECTIONS = "all, server, route, cache, latency, settings, session, sessions"


def main(words: Sequence[str]) -> int:
    listen = SETTINGS["listen"]
    parser = make_parser("stat", __doc__)
    parser.add_argument(
        "section", nargs="?", default="all", help=f"one of {_SECTIONS} (all); reset starts a new window"
    )
    parser.add_argument("session", nargs="?", metavar="id", help="of a session, after the section 'session'")
    parser.add_argument("--json", action="store_true", help="one JSON object; numbers as numbers")
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        help=f"where the daemon listens [{listen.env}, default {listen.default}]",
    )
    arguments = parser.parse_args(words)
    word, source = arguments.connect, "--connect"
    if word is None:
        word, source = os.environ.get(listen.env) or str(listen.default), f"{listen.env} or the default"
    with client_of(connect_address(word, source)) as client:
        if arguments.section == "reset":
            client.stat_reset()
            return 0
        with refusals():
            figures = client.stat(arguments.section, arguments.session)
    if arguments.json:
        print(json.dumps({name: _plain(value) for name, value in figures.items()}, indent=2))
    else:
        print(_aligned(figures), end="")
    return 0


def _aligned(figures: Mapping[str, str]) -> str:
    width = max(map(len, figures), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in figures.items())


def _plain(value: str) -> int | float | str | None:
    if value == "-":
        return None
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value
