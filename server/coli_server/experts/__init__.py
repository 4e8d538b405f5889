"""Where expert weights are: checkpoint index, expert layouts, the expert cache and its memory budget."""

from collections.abc import Mapping

from coli_server.experts.budget import (
    CachePlan,
    available_memory,
    format_size,
    parse_size,
    plan,
    resident_bytes,
)
from coli_server.experts.cache import DEFAULT_READERS, ExpertCache, staging_bytes
from coli_server.experts.checkpoint import CheckpointIndex
from coli_server.experts.direct import DirectReader
from coli_server.experts.direct import buffer_bytes as direct_buffer_bytes
from coli_server.experts.eviction import LRU, EvictionPolicy
from coli_server.experts.frequency import LFU, Learned
from coli_server.experts.history import HistoryError, UsageHistory
from coli_server.experts.layout import ExpertLayout, ExpertSource, LayerExperts, Part
from coli_server.experts.loading import CacheCounters
from coli_server.experts.mirror import MirrorReader, check_mirror
from coli_server.experts.pins import choose_pins
from coli_server.experts.reader import PreadReader, Reader
from coli_server.experts.safetensors_header import CheckpointError, TensorInfo, TensorSlice
from coli_server.experts.slab import HugePages
from coli_server.experts.slots import ABSENT, CACHED, PINNED
from coli_server.experts.stream import ExpertReadError, ExpertStream, Lease

__all__ = [
    "ABSENT",
    "CACHED",
    "DEFAULT_READERS",
    "EVICTION_POLICIES",
    "LFU",
    "LRU",
    "PINNED",
    "CacheCounters",
    "CachePlan",
    "CheckpointError",
    "CheckpointIndex",
    "DirectReader",
    "EvictionPolicy",
    "ExpertCache",
    "ExpertLayout",
    "ExpertReadError",
    "ExpertSource",
    "ExpertStream",
    "HistoryError",
    "HugePages",
    "LayerExperts",
    "Learned",
    "Lease",
    "MirrorReader",
    "Part",
    "PreadReader",
    "Reader",
    "TensorInfo",
    "TensorSlice",
    "UsageHistory",
    "available_memory",
    "check_mirror",
    "choose_pins",
    "direct_buffer_bytes",
    "format_size",
    "parse_size",
    "plan",
    "resident_bytes",
    "staging_bytes",
]

EVICTION_POLICIES: Mapping[str, type[EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "learned": Learned}
"""By the name that a user gives: see `coli bench cache` for what each is worth."""
