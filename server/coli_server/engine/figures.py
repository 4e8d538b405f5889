"""What an engine counts, and the ratios of it, for those who measure engines."""

from coli_server.telemetry.counters import (
    Counters,
    hit_pct,
    percent,
    route_agree,
    route_kl,
    route_mass_kept,
    swap_pct,
    tok_s,
)

__all__ = [
    "Counters",
    "hit_pct",
    "percent",
    "route_agree",
    "route_kl",
    "route_mass_kept",
    "swap_pct",
    "tok_s",
]
