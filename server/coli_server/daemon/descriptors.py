"""File descriptors: as many as the connections may need."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# For the model's files, the loop, threads, and clients that are being refused or are on their way out.
_OTHERS = 512


def raise_descriptor_limit(connections: int) -> None:
    """Raise this process's own limit as far as `connections` need and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        log.warning("only %d files may be open: fewer than %d connections will fit", limit, connections)
