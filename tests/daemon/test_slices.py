"""The scheduler's turns of the event loop's thread."""

import ctypes
import os
import platform
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from coli_server.daemon import slices
from coli_server.daemon.slices import SLICE_NS, SchedulingAttributes, take_short_turns

T = TypeVar("T")
GET_CALL = {"x86_64": 315, "aarch64": 275}


def attributes_of_this_thread() -> dict[str, Any]:
    """What sched_getattr(2) says."""
    found = SchedulingAttributes()
    call = ctypes.CDLL(None, use_errno=True).syscall
    assert call(GET_CALL[platform.machine()], 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return {name: getattr(found, name) for name, _ in SchedulingAttributes._fields_}


def in_a_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_only_the_turn_changes_and_only_of_the_thread_that_asks() -> None:
    def ask() -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return attributes_of_this_thread(), take_short_turns(), attributes_of_this_thread()

    before = attributes_of_this_thread()
    old, accepted, new = in_a_thread(ask)
    assert accepted
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    assert release is not None
    known = tuple(map(int, release.groups())) >= (6, 12)
    assert new["runtime"] == (SLICE_NS if known else old["runtime"])
    del old["runtime"], new["runtime"]
    assert old == new
    assert attributes_of_this_thread() == before


def test_a_machine_whose_call_is_not_known_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.platform, "machine", lambda: "sparc64")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert not in_a_thread(take_short_turns)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_another_policy_of_the_user_stays() -> None:
    def ask() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_short_turns(), os.sched_getscheduler(0)

    assert in_a_thread(ask) == (False, os.SCHED_BATCH)
