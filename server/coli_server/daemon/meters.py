"""What the event loop counts by itself: connections, bytes, faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Meters:
    """Figures of the whole daemon that belong to no session, by their names in the table of figures.

    Only the event loop writes them. The totals only grow.
    """

    connections_current: int = 0
    connections_total: int = 0
    connections_rejected_total: int = 0
    protocol_errors_total: int = 0
    slow_readers_total: int = 0
    bytes_in_total: int = 0
    bytes_out_total: int = 0
