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
    connections_rejected_address_total: int = 0
    protocol_errors_total: int = 0
    slow_readers_total: int = 0
    lines_too_long_total: int = 0
    payloads_too_large_total: int = 0
    half_command_timeouts_total: int = 0
    idle_timeouts_total: int = 0
    busy_connection_total: int = 0
    busy_session_total: int = 0
    auth_failures_total: int = 0
    engine_stalls_total: int = 0
    sessions_unsaved_total: int = 0
    bytes_in_total: int = 0
    bytes_out_total: int = 0
