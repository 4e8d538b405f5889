"""The line of figures under an answer."""

from __future__ import annotations

from dataclasses import dataclass

from coli_client import Client, Result


@dataclass(frozen=True, slots=True)
class Hits:
    """How many lookups of a session found a pinned expert, and how many one in an LRU."""

    pin: int = 0
    lru: int = 0

    @classmethod
    def of(cls, client: Client) -> Hits:
        """The session's counters so far."""
        figures = client.stat("session")
        return cls(int(figures["hits_pin"]), int(figures["hits_lru"]))

    def __sub__(self, earlier: Hits) -> Hits:
        return Hits(self.pin - earlier.pin, self.lru - earlier.lru)


def footer(result: Result, hits: Hits) -> str:
    """The figures of an answer; `hits` are those of its own lookups.

    `pin` and `lru` are percent of all lookups, as `hit` is, and add up to it. Swaps are experts that the
    stock router would not have chosen, of all that were chosen. With stock routing nothing can be swapped:
    the line says so, unless the meters are on and measured it.
    """
    hit = result.hit_pct or 0.0
    pin = hit * hits.pin / (hits.pin + hits.lru) if hits.pin else 0.0
    parts = [
        f"{result.tokens} tok",
        f"{result.tok_s or 0.0:.2f} tok/s",
        f"hit {hit:.1f}% (pin {pin:.1f} + lru {hit - pin:.1f})",
    ]
    if result.mode == "stock" and result.route_agree is None:
        return " | ".join([*parts, "stock routing"])
    parts.append(f"swap {result.swap_pct or 0.0:.1f}% ({result.route_swaps or 0}/{result.route_slots or 0})")
    if result.route_agree is not None:
        parts.append(f"route_agree {result.route_agree:.1f}%")
    if result.route_kl is not None:
        parts.append(f"route_kl {result.route_kl:.4f}")
    return " | ".join(parts)
