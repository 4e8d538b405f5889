"""The routing policy of one request: the ROUTE_* settings as a frozen value, validated once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from coli_server.routing.errors import PolicyError

Mode = Literal["off", "max-rank", "cache-prior"]
Scope = Literal["shared", "session"]


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
        _check_word("ROUTE_MODE", self.mode, get_args(Mode))
        _check_word("ROUTE_SCOPE", self.scope, get_args(Scope))
        numbers: dict[str, int | float] = {
            "j": _whole("ROUTE_J", self.j, least=0),
            "m": _whole("ROUTE_M", self.m, least=1),
            "capacity": _whole("ROUTE_CAPACITY", self.capacity, least=0),
            "p": _real("ROUTE_P", self.p, "at least 0 and under 1", lambda p: 0.0 <= p < 1.0),
            "alpha": _real("ROUTE_ALPHA", self.alpha, "over 0 and at most 1", lambda a: 0.0 < a <= 1.0),
            "lam": _real("ROUTE_LAMBDA", self.lam, "from 0 to 1", lambda x: 0.0 <= x <= 1.0),
        }
        for name, value in numbers.items():
            object.__setattr__(self, name, value)  # numpy scalars and int-for-float become plain numbers
        if not isinstance(self.prefill, bool):
            raise _refused("ROUTE_PREFILL", self.prefill, "0 or 1")
        if not (self.agree is None or isinstance(self.agree, bool)):
            raise _refused("ROUTE_AGREE", self.agree, "auto, 0 or 1")

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


def _refused(setting: str, value: object, accepted: str) -> PolicyError:
    return PolicyError(f"{setting} is {value!r}: it must be {accepted}")


def _check_word(setting: str, value: object, words: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in words):
        raise _refused(setting, value, " or ".join(words))


def _whole(setting: str, value: object, *, least: int) -> int:
    """Return `value` as an int; a bool or a float is refused even where Python would take it."""
    accepted = f"a whole number, {least} or more"
    if isinstance(value, bool):
        raise _refused(setting, value, accepted)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refused(setting, value, accepted) from None
    if number < least:
        raise _refused(setting, value, accepted)
    return number


def _real(setting: str, value: object, accepted: str, inside: Callable[[float], bool]) -> float:
    """Return `value` as a float; NaN lies in no range, so `inside` refuses it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refused(setting, value, f"a number {accepted}")
    number = float(value)
    if not inside(number):
        raise _refused(setting, value, f"a number {accepted}")
    return number


def _short(number: float) -> str:
    """The shortest text that reads back as `number`, without a trailing `.0`."""
    return repr(number).removesuffix(".0")
