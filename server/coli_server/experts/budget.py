"""How many experts a memory budget holds. The budget is for the whole process."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coli_server.errors import ConfigurationError
from coli_server.experts.slab import slab_bytes

MIB = 1 << 20
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?\s?(?:([KMGT])(?:i?B)?|B)?", re.ASCII | re.IGNORECASE)
_UNIT = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MAX_SIZE = 1 << 62


def parse_size(text: str, setting: str = "--ram") -> int:
    """Bytes of a size such as `2G`, `1.5GiB`, `800M` or `1048576`; units are powers of 1024.

    Raises ConfigurationError naming `setting` for anything else, and for sizes of 0 and beyond 2^62.
    """
    match = _SIZE.fullmatch(text)
    if match:
        whole, fraction, unit = match.groups()
        factor = _UNIT[unit.upper()] if unit else 1
        if not fraction or factor > 1:
            size = int(whole) * factor
            if fraction:
                size += int(fraction) * factor // 10 ** len(fraction)
            if 0 < size <= _MAX_SIZE:
                return size
    raise ConfigurationError(
        f"{setting}={text[:40]!r} is not a size: expected a positive number of bytes, or with a unit such as "
        "800M, 1.5G or 2GiB"
    )


def format_size(nbytes: int) -> str:
    """A size that `parse_size` reads back as at least `nbytes`: whole MiB, rounded up."""
    return f"{-(-nbytes // MIB)}M"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a budget gives. `cache_bytes` is all slabs; `total_bytes` adds everything else in the budget.

    `limited_by` says what stopped the slots from being more: the budget, the user, or the model's experts.
    """

    slots_per_layer: int
    cache_bytes: int
    total_bytes: int
    limited_by: Literal["ram", "experts_per_layer", "experts"]


def plan(
    ram: int,
    *,
    dense_bytes: int,
    kv_bytes: int,
    activation_bytes: int,
    staging_bytes: int,
    slot_bytes: Sequence[int],
    experts: Sequence[int],
    k: int,
    experts_per_layer: int | None = None,
    runtime_bytes: int = 0,
    margin_bytes: int = 0,
) -> CachePlan:
    """The same number of slots for every MoE layer, as many as `ram` bytes hold beside everything else.

    `slot_bytes` and `experts` have one entry for each MoE layer, so a wide layer is priced at its own width.
    `k` is the number of experts a token needs. `runtime_bytes` is what the process holds before any model is
    loaded (interpreter, libraries, compiled code), and `margin_bytes` by how much that may differ from start
    to start: a budget that a message names has them on top. `experts_per_layer` is the user's own limit:
    obeyed, never raised, cut to what the layers have.

    Raises ConfigurationError when `experts_per_layer` is under `k`, and when `ram` cannot hold `k` slots a
    layer: the message then has the smallest budget that works.
    """
    most = max(experts)
    if experts_per_layer is not None and experts_per_layer < k:
        raise ConfigurationError(
            f"--experts-per-layer={experts_per_layer} is too small: one token needs {k} experts a layer "
            f"(accepted: {k} to {most})"
        )
    fixed = dense_bytes + kv_bytes + activation_bytes + staging_bytes + runtime_bytes
    least = fixed + _cache_bytes(k, slot_bytes, experts)
    if ram < least:
        raise ConfigurationError(
            f"--ram={ram // MIB}M is too small for this model: the least that works is "
            f"--ram={format_size(least + margin_bytes)} "
            f"({format_size(fixed)} without experts, and {k} experts a layer)"
        )
    limit = most if experts_per_layer is None else min(experts_per_layer, most)
    slots = _most_slots(ram - fixed, k, limit, slot_bytes, experts)
    cache = _cache_bytes(slots, slot_bytes, experts)
    limited_by: Literal["ram", "experts_per_layer", "experts"]
    limited_by = "experts" if slots == most else "experts_per_layer" if slots == experts_per_layer else "ram"
    return CachePlan(slots, cache, fixed + cache, limited_by)


def _cache_bytes(slots: int, slot_bytes: Sequence[int], experts: Sequence[int]) -> int:
    """Bytes of all slabs; a layer with fewer experts than slots has a slot for each of them."""
    return sum(slab_bytes(min(slots, count), size) for size, count in zip(slot_bytes, experts, strict=True))


def _most_slots(room: int, k: int, limit: int, slot_bytes: Sequence[int], experts: Sequence[int]) -> int:
    """The largest number in [k, limit] whose slabs fit into `room` bytes; k is known to fit."""
    low, high = k, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(middle, slot_bytes, experts) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may use without swapping: the least of what the system and its cgroups leave.

    Raises ConfigurationError when the system does not say.
    """
    found = [_meminfo_available(proc / "meminfo"), *_cgroup_rooms(proc / "self" / "cgroup", cgroups)]
    return max(0, min(found))


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """This process's resident memory now, in bytes."""
    pages = int((proc / "self" / "statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def _meminfo_available(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    raise ConfigurationError("the system does not tell its available memory: set --ram")


def _cgroup_rooms(membership: Path, root: Path) -> list[int]:
    """What each memory limit above this process leaves; version 2 and version 1 hierarchies."""
    rooms = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += _rooms_upwards(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms_upwards(root / "memory", path, *files)
    return rooms


def _rooms_upwards(mount: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[int]:
    """Rooms under the limits of the group `path` and every group above it up to the mount.

    A container may not see the path that it is told; its own limits are then those of the mount.
    """
    rooms = []
    group = mount if ".." in path.split("/") else mount / path.strip("/")
    for folder in (group, *group.parents):
        limit = _number(folder / limit_file)
        usage = _number(folder / usage_file)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + _stat(folder / "memory.stat", reclaimable))
        if folder == mount:
            break
    return rooms


def _number(file: Path) -> int | None:
    """The file's number; None for `max` and when there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, name: str) -> int:
    """One figure of memory.stat in bytes: page cache that the kernel drops when memory is wanted."""
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
