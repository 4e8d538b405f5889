"""Memory limits for what is measured: a control group (cgroup) of its own, of version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coli_server.bench.speed_program import Enter
from coli_server.errors import ConfigurationError

AUTO = "auto"
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # version 1, version 2
# Memory and swap together in version 1, which must not be below the limit; swap alone in version 2.
_SWAP = {"memory.memsw.limit_in_bytes": None, "memory.swap.max": "0"}


def memory_group(
    word: str | None, own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")
) -> Path | None:
    """The group that `--cgroup` names: a folder, or with `auto` the one in which a limit can be set.

    That is this process's own. In version 2 a group that holds processes gives its children no memory limit,
    so it may be one further up. `own` and `mounts` are where the system tells of both.
    Raises ConfigurationError where there is none.
    """
    if word is None:
        return None
    places = list(_places(own, mounts)) if word == AUTO else [Path(word)]
    for place in places:
        if _can_limit(place):
            return place
    tried = ", ".join(map(str, places)) or "no memory controller"
    raise ConfigurationError(
        f"--cgroup={word}: no group with a memory limit can be made ({tried}); it takes root, or a group "
        "that is yours: systemd-run --user --scope -p Delegate=yes"
    )


def _places(own: Path, mounts: Path) -> Iterator[Path]:
    """Folders of groups of this process that may take a limited child, the likeliest first."""
    if not (own.exists() and mounts.exists()):
        return
    mounted = [line.split(" ") for line in mounts.read_text().splitlines()]
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, root, kind, options, *_ in mounted:
            if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                yield Path(root + path)
            elif kind == "cgroup2" and not controllers:
                group = Path(root + path)
                yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _can_limit(parent: Path) -> bool:
    group = parent / f"coli-bench-probe-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return False
    try:
        return any((group / name).exists() for name in _LIMITS)
    finally:
        group.rmdir()


@contextmanager
def limited(parent: Path | None, mebibytes: int) -> Iterator[Enter | None]:
    """What a child calls first to have at most so much memory, page cache included; None without a group.

    The children must have ended when the context does: the group is removed then.
    """
    if parent is None:
        yield None
        return
    group = parent / f"coli-bench-{os.getpid()}"
    group.mkdir()
    try:
        limit = str(mebibytes << 20)
        next(group / name for name in _LIMITS if (group / name).exists()).write_text(limit)
        for name, value in _SWAP.items():
            if (group / name).exists():
                (group / name).write_text(limit if value is None else value)
        yield lambda: _join(group)
    finally:
        _remove(group)


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _remove(group: Path) -> None:
    """Remove a group whose processes have ended; the kernel takes a moment to see that."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    group.rmdir()
