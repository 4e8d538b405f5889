"""Arguments that several commands have: where the daemon is, and what a request says."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from coli_client import Client
from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING, SAMPLING
from coli_server.settings import SETTINGS, Address, Listen, given

# Of a request, by their names in the protocol.
_REQUEST: Mapping[str, tuple[str, str]] = {
    "max": ("N", "generate at most N tokens (256)"),
    "temp": ("T", "temperature; 0 = always the likeliest token (0)"),
    "top_p": ("P", "draw from the likeliest tokens that have this probability together (1)"),
    "top_k": ("N", "draw from the N likeliest tokens; 0 = all (0)"),
    "min_p": ("P", "leave out tokens below P times the likeliest one's probability (0)"),
    "repeat_penalty": ("F", "divide the logits of tokens that occurred by F (1)"),
    "seed": ("N", "of the random numbers (0)"),
    "deadline_ms": ("MS", "end after so many milliseconds"),
}


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of one command. Abbreviated flags are refused: a mistyped one must not be another one."""
    return argparse.ArgumentParser(
        prog=f"coli {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for everything that a request may say about drawing tokens and about its size."""
    group = parser.add_argument_group("Request", "defaults in parentheses")
    for name, (metavar, help) in _REQUEST.items():
        group.add_argument(_flag(name), dest=name, metavar=metavar, help=help)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before TEXT; may be given up to four times"
    )


def request_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The checked request options that were given, as the client library takes them."""
    options: dict[str, Any] = {}
    for name in _REQUEST:
        word = getattr(arguments, name)
        if word is not None:
            options[name] = option_value(name, word, _flag(name))
    if arguments.stop:
        options["stop"] = arguments.stop
    return options


def routing_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The checked routing options that the user gave, as flags or in the environment."""
    flags = vars(arguments)
    options: dict[str, Any] = {}
    for name, word in given(flags, os.environ).items():
        if name in ROUTING:
            source = "the environment" if flags.get(name) is None else SETTINGS[name].flag
            options[name] = _for_client(SETTINGS[name].parse(word, source))
    return options


def option_value(name: str, word: str, source: str) -> Any:
    """The value of a protocol option as the client library takes it; `source` is named in the error."""
    accepted = ROUTING.get(name) or SAMPLING.get(name)
    if accepted is None:
        return word
    try:
        return _for_client(accepted.parse(word))
    except ValueError:
        raise ConfigurationError(f"{name} is {word!r} (from {source}), must be {accepted}") from None


def connect_address(word: str, source: str) -> Address:
    """The address of a daemon; raises ConfigurationError."""
    try:
        return Listen().parse(word)
    except ValueError:
        raise ConfigurationError(f"{word!r} (from {source}) must be HOST:PORT, PORT or unix:PATH") from None


def add_connect_argument(parser: argparse.ArgumentParser) -> None:
    """`--connect`, for commands that need a running daemon."""
    listen = SETTINGS["listen"]
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        help=f"where the daemon listens [{listen.env}, default {listen.default}]",
    )


def daemon_address(arguments: argparse.Namespace) -> Address:
    """The address that `--connect`, else the environment, else the default says."""
    listen = SETTINGS["listen"]
    if arguments.connect is not None:
        return connect_address(arguments.connect, "--connect")
    return connect_address(os.environ.get(listen.env) or str(listen.default), f"{listen.env} or the default")


def client_of(address: Address) -> Client:
    """A client, not connected yet, of the daemon that listens there.

    COLI_TOKEN is shown to it; with COLI_CAFILE (what to trust, or empty for what the system trusts) the
    connection is encrypted, but on a Unix socket.
    """
    token = os.environ.get("COLI_TOKEN") or None
    with refusals():
        if address.path is not None:
            return Client(f"unix:{address.path}", address.port, token=token)
        cafile = os.environ.get("COLI_CAFILE")
        try:
            return Client(
                address.host, address.port, token=token, tls=cafile is not None, cafile=cafile or None
            )
        except OSError as error:
            raise ConfigurationError(f"COLI_CAFILE is {cafile!r}: {error.strerror or error}") from None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What the client library refuses to send is the user's mistake here: say so as any other one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None


def _for_client(value: Any) -> Any:
    return "auto" if value is None else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
