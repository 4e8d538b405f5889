"""Ports for programs that cannot choose a free one by themselves."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
