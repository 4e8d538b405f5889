"""Dialogues of named sessions outlive the daemon, where that is asked for."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coli_server.daemon import dialogues
from coli_server.daemon.dialogues import Dialogues
from coli_server.daemon.meters import Meters
from coli_server.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.daemon.conftest import Running, Serve

ALICE, BOB = "a" * 20, "b" * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def chat(running: Running, *lines: str, last: str = "DONE") -> str:
    client = await running.connect()
    client.send(*lines)
    return (await client.until(last))[-1]


async def test_a_dialogue_goes_on_after_a_restart(serve: Serve, folder: Path) -> None:
    turns = ("CHAT max=4 One", "CHAT max=4 Two")
    reference = await serve()
    client = await reference.connect()
    client.send("SESSION s", "SET system Be-brief", 'SET stop "zzz"', *turns)
    await client.until("DONE")
    want = await client.until("DONE")

    first = await serve(session_dir=str(folder))
    await chat(first, "SESSION s", "SET system Be-brief", 'SET stop "zzz"', turns[0])
    await first.stop()
    second = await serve(session_dir=str(folder))
    client = await second.connect()
    assert await client.ask("SESSION s") == "OK session=s new=0"
    client.send(turns[1])
    got = await client.until("DONE")
    assert [line.split(" ", 2)[2] for line in got if line.startswith("TOK")] == [
        line.split(" ", 2)[2] for line in want if line.startswith("TOK")
    ]


async def test_files_are_for_their_owner_alone_and_hold_no_anonymous_session(
    serve: Serve, folder: Path
) -> None:
    running = await serve(session_dir=str(folder))
    await chat(running, "CHAT max=2 Hello")
    await chat(running, "SESSION s", "CHAT max=2 Hello")
    assert os.listdir(folder) == ["s.json"]
    assert (mode(folder), mode(folder / "s.json")) == (0o700, 0o600)
    await chat(running, "SESSION s", "RESET", "PING", last="PONG")
    assert json.loads((folder / "s.json").read_text())["dialogue"] == []


async def test_an_owner_stays_the_owner_after_a_restart(serve: Serve, folder: Path) -> None:
    tokens = f"alice={ALICE} bob={BOB}"
    first = await serve(session_dir=str(folder), tokens=tokens)
    await chat(first, f"AUTH {ALICE}", "SESSION s", "CHAT max=2 Hello")
    await first.stop()
    second = await serve(session_dir=str(folder), tokens=tokens)
    assert (await chat(second, f"AUTH {BOB}", "SESSION s", last="ERR")).startswith("ERR FORBIDDEN ")
    assert await chat(second, f"AUTH {ALICE}", "SESSION s", last="OK session") == "OK session=s new=0"


async def test_a_session_that_expires_or_makes_room_is_removed(serve: Serve, folder: Path) -> None:
    running = await serve(session_dir=str(folder), max_sessions=1)
    client = await running.connect()
    client.send("SESSION a", "CHAT max=2 Hello", "QUIT")
    await client.rest()
    await chat(running, "SESSION b", "CHAT max=2 Hello")
    assert os.listdir(folder) == ["b.json"]


async def test_only_as_many_come_back_as_there_is_room_for_the_latest_first(
    serve: Serve, folder: Path
) -> None:
    first = await serve(session_dir=str(folder))
    for name in "abc":
        await chat(first, f"SESSION {name}", "CHAT max=2 Hello")
    await first.stop()
    second = await serve(session_dir=str(folder), max_sessions=2)
    for name, new in (("c", 0), ("b", 0), ("a", 1)):
        client = await second.connect()
        client.send(f"SESSION {name}", "QUIT")
        assert (await client.rest())[0] == f"OK session={name} new={new}"


async def test_a_full_disk_costs_the_copy_and_not_the_dialogue(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await serve(session_dir=str(folder))
    await chat(running, "SESSION s", "CHAT max=2 Hello")
    before = (folder / "s.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(dialogues.os, "fsync", full)
    assert (await chat(running, "SESSION s", "CHAT max=2 Again")).startswith("DONE 1 finish=length")
    assert (await running.figures_when(sessions_unsaved_total="1"))["requests_length_total"] == "2"
    assert (folder / "s.json").read_bytes() == before
    assert os.listdir(folder) == ["s.json"]


DAMAGED = ["", "{}", "[]", "null", "[" * 100_000, '{"format": 2}', '{"format": 1, "name": "x"}']
GOOD = {"format": 1, "name": "x", "owner": None, "used": 1e9, "dialogue": [], "options": {}}
DAMAGED += [
    json.dumps({**GOOD, **change})
    for change in (
        {"name": "../x"},
        {"name": "y"},
        {"owner": 7},
        {"used": "x"},
        {"dialogue": [{"role": "user"}]},
        {"dialogue": [{"role": "user", "content": 7}]},
        {"dialogue": 7},
        {"options": 7},
    )
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_left_alone_and_the_others_come_back(folder: Path, content: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / "x.json").write_text(content)
    (folder / "good.json").write_text(
        json.dumps({**GOOD, "name": "good", "options": {"temp": 0.5, "new": 1}})
    )
    with ThreadPoolExecutor(1) as executor:
        (saved,) = Dialogues(str(folder), executor, Meters()).load()
    assert (saved.name, saved.options) == ("good", {"temp": 0.5})
    assert (folder / "x.json").read_text() == content


def test_a_folder_that_others_can_read_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigurationError, match="COLI_SESSION_DIR"):
        Dialogues(str(folder), executor, Meters()).load()
