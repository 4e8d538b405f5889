"""The asyncio TCP daemon: connections, sessions and requests around one engine thread."""

from coli_server.daemon.run import Configuration, run

__all__ = ["Configuration", "run"]
