"""Memory limits of `coli bench speed`: where a group can be made, and that a child has its limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coli_server.bench.speed_cgroup import _places, limited, memory_group
from coli_server.errors import ConfigurationError


def told(folder: Path, own: str, mounts: str) -> tuple[Path, Path]:
    """Files like /proc/self/cgroup and /proc/self/mounts."""
    (folder / "cgroup").write_text(own)
    (folder / "mounts").write_text(mounts)
    return folder / "cgroup", folder / "mounts"


def test_version_1_has_the_place_of_the_memory_controller(tmp_path: Path) -> None:
    own = "5:devices:/\n4:memory:/service/one\n3:cpu,cpuacct:/else\n0::/unified\n"
    mounts = (
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n"
    )
    places = list(_places(*told(tmp_path, own, mounts)))
    assert places == [Path("/sys/fs/cgroup/memory/service/one")]


def test_version_2_may_be_a_group_further_up(tmp_path: Path) -> None:
    mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
    places = list(_places(*told(tmp_path, "0::/user.slice/run.scope\n", mounts)))
    root = Path("/sys/fs/cgroup")
    assert places == [root / "user.slice/run.scope", root / "user.slice", root]


def test_without_a_group_the_reason_is_said(tmp_path: Path) -> None:
    assert memory_group(None) is None
    with pytest.raises(ConfigurationError, match=r"--cgroup=auto: no group .*no memory controller"):
        memory_group("auto", *told(tmp_path, "0::/\n", ""))
    with pytest.raises(ConfigurationError, match=r"--cgroup=\S+/nowhere: no group"):
        memory_group(str(tmp_path / "nowhere"))
    with limited(None, 100) as enter:
        assert enter is None


def test_a_child_has_the_limit_of_its_group_and_the_group_goes_with_it() -> None:
    """Where this process may make groups; elsewhere it is told that it may not."""
    try:
        parent = memory_group("auto")
    except ConfigurationError as error:
        if "--cgroup=auto: no group with a memory limit can be made" in str(error):
            return
        raise
    assert parent is not None
    take = "import sys; taken = bytearray(int(sys.argv[1]) << 20); print(len(taken) >> 20)"
    with limited(parent, 100) as enter:
        made = {int(word): run(take, word, enter) for word in ("10", "300")}
        assert [group.name for group in parent.glob("coli-bench-*")]
    assert made[10].stdout == "10\n"
    assert made[300].returncode != 0
    assert not list(parent.glob("coli-bench-*"))


def run(program: str, word: str, enter: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, word]
    return subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, check=False)  # type: ignore[call-overload, no-any-return]
