"""The folders of machine code beside the one in use."""

import os
import time
from pathlib import Path

import pytest

from coli_server.engine.code_memory import KEPT_DAYS, remove_unused_code
from coli_server.engine.kernels.runtime import code_cache_folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = code_cache_folder()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    return folder


def _started(folder: Path, days_ago: float, marker_days_ago: float | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "code.nbc").write_bytes(b"code")
    then = time.time() - 86400 * days_ago
    if marker_days_ago is not None:
        marker = folder / "compiled-1"
        marker.touch()
        os.utime(marker, (time.time() - 86400 * marker_days_ago,) * 2)
    os.utime(folder, (then, then))
    return folder


def test_code_of_versions_that_nobody_starts_any_more_is_removed(own: Path) -> None:
    _started(own, KEPT_DAYS + 1)
    old = _started(own.with_name("kernels-old"), KEPT_DAYS + 1, KEPT_DAYS + 1)
    recent = _started(own.with_name("kernels-recent"), KEPT_DAYS - 1)
    started = _started(own.with_name("kernels-started"), KEPT_DAYS + 1, 1)
    other = _started(own.with_name("downloads"), KEPT_DAYS + 1)
    assert remove_unused_code() == [old]
    assert not old.exists()
    assert all((folder / "code.nbc").exists() for folder in (own, recent, started, other))
    assert remove_unused_code() == []


def test_a_code_cache_that_the_user_named_is_left_alone(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _started(own.with_name("kernels-old"), KEPT_DAYS + 1)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert remove_unused_code() == []
    assert old.exists()
