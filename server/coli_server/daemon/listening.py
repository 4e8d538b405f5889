"""Sockets to listen on: bound before the model is loaded, so that a taken port is known at once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

from coli_server.errors import ConfigurationError
from coli_server.settings import Address, Listen, Settings

# Of connections that the kernel accepts before the daemon does. Thousands may come at once after a restart.
BACKLOG = 1024


def bind(settings: Settings) -> list[socket.socket]:
    """Sockets bound to `settings.listen`, not listening yet: clients are refused until the daemon can serve.

    Raises ConfigurationError naming the address.
    """
    address = settings.listen
    try:
        return [_bind_unix(address.path)] if address.path is not None else bind_tcp(address)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"COLI_LISTEN is {address}: cannot listen there: {reason}") from None


def check_reach(bound: list[socket.socket], settings: Settings, *, tokens: bool) -> None:
    """Raise ConfigurationError when other machines could use the daemon and nobody asks who they are."""
    if tokens or settings.insecure_bind:
        return
    for one in bound:
        place = describe(one)
        if not Listen().parse(place).loopback:
            raise ConfigurationError(
                f"COLI_LISTEN is {place}: other machines could use the daemon, and nobody asks who they are; "
                "choose a loopback address, give tokens (COLI_TOKEN_FILE) or set COLI_INSECURE_BIND=1"
            )


def describe(bound: socket.socket) -> str:
    """The address of a bound socket, in the form in which COLI_LISTEN takes it."""
    name = bound.getsockname()
    return str(Address(path=name) if bound.family == socket.AF_UNIX else Address(name[0], name[1]))


def unlink(bound: list[socket.socket]) -> None:
    """Remove the files of Unix sockets."""
    for one in bound:
        if one.family == socket.AF_UNIX:
            with suppress(OSError):
                os.unlink(one.getsockname())


def bind_tcp(address: Address) -> list[socket.socket]:
    """One socket for each address of the host; with port 0 all get the first one's port. Raises OSError."""
    found = socket.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            port = bound[0].getsockname()[1] if len(bound) > 1 else address.port
            one.bind((place[0], port, *place[2:]))
    except OSError:
        for one in bound:
            one.close()
        raise
    return bound


def _bind_unix(path: str) -> socket.socket:
    _remove_stale(path)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # only the owner may connect
    try:
        one.bind(path)
    except OSError:
        one.close()
        raise
    finally:
        os.umask(mask)
    return one


def _remove_stale(path: str) -> None:
    """Remove the socket of a daemon that is gone. One that still answers keeps its path."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "it exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
