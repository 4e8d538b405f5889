"""The slots of one MoE layer: which expert is in which, which are free, and what may be given up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coli_server.experts.eviction import EvictionPolicy
from coli_server.experts.layout import Bytes, FileRead, LayerExperts, plan_reads
from coli_server.experts.pool import ReadJob

ABSENT, CACHED, PINNED = 0, 1, 2


class LayerSlots:
    """Books of one layer. A slot is free, holds a cached or pinned expert, or belongs to a running load.

    `prefetching` are the loads that nobody has asked for yet, `unused` the cached experts that came so.
    `memory` is uint8 [slots, slot_bytes] beginning at `base`. `state` uint8, `resident` bool and `address`
    int64 (0 when absent), all [experts], change in place with every load and eviction.
    """

    def __init__(self, experts: LayerExperts, memory: Bytes, policy: EvictionPolicy) -> None:
        self.layer = experts.layer
        self.layout = experts.layout
        self.experts = experts.experts
        self.expert_bytes = experts.expert_bytes()
        self.memory = memory
        self.state = np.zeros(self.experts, np.uint8)
        self.resident: NDArray[np.bool_] = np.zeros(self.experts, np.bool_)
        self.address = np.zeros(self.experts, np.int64)
        self.slot_of: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.prefetching: dict[int, ReadJob] = {}
        self.unused: set[int] = set()
        self.free = list(range(len(memory) - 1, -1, -1))
        self.policy = policy
        self._base = memory.ctypes.data
        self._sources = experts.sources
        self._reads: dict[int, tuple[FileRead, ...]] = {}

    @property
    def evictable(self) -> int:
        """Slots that pins do not hold."""
        return len(self.memory) - len(self.pinned)

    def reads(self, expert: int) -> tuple[FileRead, ...]:
        """How to fetch the expert; worked out once."""
        plan = self._reads.get(expert)
        if plan is None:
            plan = self._reads[expert] = plan_reads(self.layout, self._sources[expert])
        return plan

    def insert(self, expert: int, slot: int) -> None:
        """A load ended well: the expert is in `slot`. The policy does not know it yet."""
        self.slot_of[expert] = slot
        self.state[expert] = CACHED
        self.resident[expert] = True
        self.address[expert] = self._base + slot * self.layout.slot_bytes

    def evict(self, expert: int) -> int:
        """Forget an expert that the policy does not hold any more; its slot."""
        self.state[expert] = ABSENT
        self.resident[expert] = False
        self.address[expert] = 0
        return self.slot_of.pop(expert)

    def pin(self, expert: int) -> None:
        """A cached expert in the policy becomes a pinned one."""
        self.policy.remove(expert)
        self.pinned.add(expert)
        self.state[expert] = PINNED
