"""The daemon that `chat` and `gen` talk to: a running one that is named, or a private one."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from coli_client import Client
from coli_server.cli.arguments import client_of, connect_address, refusals, routing_options
from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING
from coli_server.settings import NETWORK, SETTINGS, add_arguments

# A private daemon chooses its own address, and nobody else can reach it.
_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.group != NETWORK)


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """`--connect`, `--session`, and every setting that a private daemon can have."""
    group = parser.add_argument_group(
        "Daemon",
        "Without --connect a private daemon runs as long as the command does, with the settings below.\n"
        "With it, routing settings that are given as flags or variables are sent to that daemon's session.",
    )
    group.add_argument(
        "--connect", metavar="ADDRESS", help="use the daemon that listens on HOST:PORT, PORT or unix:PATH"
    )
    group.add_argument("--session", metavar="ID", help="attach to the session of this name")
    add_arguments(parser, _SETTINGS)


@contextlib.contextmanager
def attached(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client of the daemon that `arguments` ask for, in a session that has the routing options given."""
    with contextlib.ExitStack() as stack:
        if arguments.connect is None:
            from coli_server.cli.private import private_daemon

            flags = {name: getattr(arguments, name) for name in _SETTINGS}
            address = stack.enter_context(private_daemon(flags))
        else:
            _refuse_private_settings(arguments)
            address = connect_address(arguments.connect, "--connect")
        options = routing_options(arguments)
        client = stack.enter_context(client_of(address))
        if arguments.session is not None:
            with refusals():
                client.session(arguments.session)
        if arguments.connect is not None:
            for name, value in options.items():
                client.set(name, value)
        yield client


def _refuse_private_settings(arguments: argparse.Namespace) -> None:
    """A flag that does nothing is refused; a variable may be meant for other commands."""
    for name in _SETTINGS:
        if name not in ROUTING and getattr(arguments, name) is not None:
            raise ConfigurationError(
                f"{SETTINGS[name].flag} is a setting of a private daemon: it has no effect with --connect"
            )
