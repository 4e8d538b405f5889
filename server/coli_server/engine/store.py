"""What a user may choose about the expert store of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from coli_server.routing import RoutePolicy


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How experts come into memory and stay there.

    pilot    guess the experts of the next layer and read them ahead
    """

    pilot: bool = False


def describe_mode(policy: RoutePolicy, *, pilot: bool) -> str:
    """In one word without blanks what is on that changes speed or output: `stock,pilot`, ..."""
    return policy.describe() + (",pilot" if pilot else "")
