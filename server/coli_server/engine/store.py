"""What a user may choose about the expert store of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coli_server.routing import RoutePolicy


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How experts come into memory and stay there.

    pilot    guess the experts of the next layer and read them ahead
    evict    which expert a full layer gives up: `lru`, `lfu` or `learned`
    trace    the file in which routing is recorded; None: nowhere
    history  the folder where the use of experts is remembered from run to run; None: nowhere
    pin      `auto`: keep what this model has used most, as far as `history` knows; `off`; or the file of a
             usage history, which must be this model's
    pin_ram  bytes of the expert cache that pins may take; None: half of what is beyond K experts a layer
    """

    pilot: bool = False
    evict: str = "lru"
    trace: Path | None = None
    history: Path | None = None
    pin: str = "off"
    pin_ram: int | None = None


def describe_mode(policy: RoutePolicy, *, pilot: bool) -> str:
    """In one word without blanks what is on that changes speed or output: `stock,pilot`, ..."""
    return policy.describe() + (",pilot" if pilot else "")
