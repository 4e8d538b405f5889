"""The routing policy of one request: the ROUTE_* settings as a frozen value, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from coli_server.ranges import ROUTING, Choices, Range
from coli_server.routing.errors import PolicyError

Mode = Literal["off", "max-rank", "cache-prior"]
Scope = Literal["shared", "session"]


# Of each field: its setting, what that accepts, and the plain type of its numbers.
_SETTINGS: dict[str, tuple[str, Range, type[int | float] | None]] = {
    "mode": ("ROUTE_MODE", Choices(tuple((mode, mode) for mode in get_args(Mode))), None),
    "j": ("ROUTE_J", ROUTING["route_j"], int),
    "m": ("ROUTE_M", ROUTING["route_m"], int),
    "p": ("ROUTE_P", ROUTING["route_p"], float),
    "alpha": ("ROUTE_ALPHA", ROUTING["route_alpha"], float),
    "lam": ("ROUTE_LAMBDA", ROUTING["route_lambda"], float),
    "scope": ("ROUTE_SCOPE", ROUTING["route_scope"], None),
    "capacity": ("ROUTE_CAPACITY", ROUTING["route_capacity"], int),
    "prefill": ("ROUTE_PREFILL", ROUTING["route_prefill"], None),
    "agree": ("ROUTE_AGREE", ROUTING["route_agree"], None),
}


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """How experts are chosen. `mode="off"` is the stock router; the other fields then do nothing.

    j         the true top-j are always taken, resident or not (clamped to K at use)
    m         max-rank: the window, in ranks (widened to K and cut to the number of experts at use)
    p         max-rank: when above 0, the window is the smallest prefix of the ranking that holds at least
              this share of the gate mass, and `m` is not used
    alpha     the gate mass of a substituted expert is multiplied by this
    lam       cache-prior: the strength of the bonus for resident experts
    scope     whose residency the router sees: the real cache, or the request's own logical LRU
    capacity  session scope: experts a layer in the logical LRU; 0 = max(K, experts // 2)
    prefill   also route prompt tokens under the policy
    agree     whether KL and mass are measured; None = only when the mode is not `off`

    Raises PolicyError, which names the setting, its value and the accepted range.
    """

    mode: Mode = "off"
    j: int = 2
    m: int = 12
    p: float = 0.0
    alpha: float = 1.0
    lam: float = 0.1
    scope: Scope = "shared"
    capacity: int = 0
    prefill: bool = False
    agree: bool | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            setting, accepted, plain = _SETTINGS[name]
            value = getattr(self, name)
            if not accepted.contains(value):
                raise PolicyError(f"{setting} is {value!r}: it must be {accepted}")
            if plain is not None:
                object.__setattr__(self, name, plain(value))  # NumPy's numbers and 1 for 1.0 become plain

    @property
    def active(self) -> bool:
        """Whether this policy can choose other experts than the stock router does."""
        return self.mode != "off"

    @property
    def meters(self) -> bool:
        """Whether agreement, KL and mass are reported: `agree`, with None resolved."""
        return self.active if self.agree is None else self.agree

    def session_capacity(self, k: int, experts: int) -> int:
        """Return how many experts a layer the logical LRU of session scope holds."""
        return self.capacity or max(k, experts // 2)

    def describe(self) -> str:
        """Say in one word without blanks what is on: `stock`, `max-rank,J=2,M=12,shared`, ..."""
        if not self.active:
            return "stock"
        words: list[str] = [self.mode]
        if self.mode == "cache-prior":
            words += [f"lambda={_short(self.lam)}", f"J={self.j}"]
        else:
            words += [f"J={self.j}", f"P={_short(self.p)}" if self.p > 0.0 else f"M={self.m}"]
        if self.alpha != 1.0:
            words.append(f"alpha={_short(self.alpha)}")
        words.append(self.scope)
        if self.scope == "session" and self.capacity:
            words.append(f"capacity={self.capacity}")
        if self.prefill:
            words.append("prefill")
        return ",".join(words)


def _short(number: float) -> str:
    """The shortest text that reads back as `number`, without a trailing `.0`."""
    return repr(number).removesuffix(".0")
