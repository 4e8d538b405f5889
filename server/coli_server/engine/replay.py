"""How a recorded stream of wanted experts would have fared under other eviction policies and sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.experts import EVICTION_POLICIES, EvictionPolicy

Wanted = Sequence[int]
"""What one step wants of one layer: distinct experts in the order in which they count as used."""


def accesses(records: NDArray[Any], layers: int, field: str) -> list[list[list[int]]]:
    """For each layer what every step wanted; `field` is `true` (stock routing) or `chosen` (what ran)."""
    wanted: list[list[list[int]]] = [[] for _ in range(layers)]
    if not len(records):
        return wanted
    order = np.lexsort((np.arange(len(records)), records["step"], records["slot"]))
    slots, steps, experts = (records[name][order] for name in ("slot", "step", field))
    borders = np.flatnonzero((np.diff(slots.astype(np.int64)) != 0) | (np.diff(steps.astype(np.int64)) != 0))
    for rows in np.split(np.arange(len(records)), borders + 1):
        wanted[int(slots[rows[0]])].append(list(dict.fromkeys(experts[rows].reshape(-1).tolist())))
    return wanted


def misses(steps: Sequence[Wanted], slots: int, make_policy: Callable[[], EvictionPolicy]) -> int:
    """How many experts a layer with `slots` slots would have read, as the expert cache works."""
    policy, resident, missed = make_policy(), set[int](), 0
    for wanted in steps:
        missing = [expert for expert in wanted if expert not in resident]
        used = deque(expert for expert in wanted if expert in resident)
        for expert in used:
            policy.remove(expert)
        missed += len(missing)
        for expert in missing:
            if len(resident) == slots:
                victim = policy.victim()
                if victim is None:  # more is wanted than there are slots: what was used gives way
                    victim = used.popleft()
                else:
                    policy.remove(victim)
                resident.remove(victim)
            resident.add(expert)
            used.append(expert)
        for expert in wanted:
            if expert in resident:
                policy.insert(expert)
    return missed


def least_misses(steps: Sequence[Wanted], slots: int, *, bypass: bool) -> int:
    """Misses of a cache that knows the future (Belady): whoever is wanted last, or never, goes first.

    With `bypass` an expert may be read, used and not kept; without it everything that a step wanted is kept
    as long as there are slots for it, as in the expert cache.
    """
    never = len(steps)
    following: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(steps) - 1, -1, -1):
        following.append([seen.get(expert, never) for expert in steps[number]])
        seen.update(dict.fromkeys(steps[number], number))
    following.reverse()
    resident: dict[int, int] = {}  # expert to its next use
    missed = 0
    for wanted, uses in zip(steps, following, strict=True):
        missed += sum(expert not in resident for expert in wanted)
        later = dict(zip(wanted, uses, strict=True))
        resident.update(later if bypass else dict.fromkeys(wanted, -1))
        excess = len(resident) - slots
        if excess > 0:
            keep = sorted(resident, key=resident.__getitem__)[:slots]
            resident = {expert: resident[expert] for expert in keep}
        resident.update((expert, use) for expert, use in later.items() if expert in resident)
    return missed


POLICIES: dict[str, Callable[[Sequence[Wanted], int], int]] = {
    **{
        name: lambda steps, slots, policy=policy: misses(steps, slots, policy)  # type: ignore[misc]
        for name, policy in EVICTION_POLICIES.items()
    },
    "belady": lambda steps, slots: least_misses(steps, slots, bypass=False),
    "belady-bypass": lambda steps, slots: least_misses(steps, slots, bypass=True),
}
"""Misses of a layer's steps with a number of slots, by policy."""
