"""What deploy/monitoring ships, run against a real daemon as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.ports import free_port

if TYPE_CHECKING:
    from tests.system.conftest import Daemon, StartDaemon

FOLDER = Path(__file__).resolve().parents[2] / "deploy/monitoring"


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, small_model: Path) -> Iterator[Daemon]:
    with start_daemon("--model", str(small_model), "--ram", "2G", "--experts-per-layer", "6") as daemon:
        yield daemon


@pytest.fixture
def environment(daemon: Daemon, clean_environment: Mapping[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of an agent on the daemon's machine, with `coli` on its path."""
    launcher = tmp_path / "coli"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m coli_server.cli "$@"\n')
    launcher.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{clean_environment['PATH']}"
    return {**clean_environment, "PATH": path, "COLI_LISTEN": daemon.address}


def run(command: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)


def test_the_memcached_check_of_a_daemon_that_serves_and_of_none(daemon: Daemon) -> None:
    words = [sys.executable, str(FOLDER / "memcached_monitor.py")]
    done = subprocess.run([*words, daemon.address], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"ready requests_running=0 requests_waiting=0 tok_s=\S+ .*mode=stock\n", done.stdout)
    done = subprocess.run([*words, f"127.0.0.1:{free_port()}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:9]) == (2, "no answer")


def test_telegrafs_command_gives_numbers_and_the_named_texts(environment: Mapping[str, str]) -> None:
    (section,) = tomllib.loads((FOLDER / "telegraf.conf").read_text("utf-8"))["inputs"]["exec"]
    (command,) = section["commands"]
    figures = json.loads(run(command, environment).stdout)
    texts = {name for name, value in figures.items() if isinstance(value, str)}
    assert set(section["json_string_fields"]) <= texts
    assert figures["requests_running"] == 0


def test_zabbix_items_are_single_figures(environment: Mapping[str, str]) -> None:
    lines = re.findall(
        r"^UserParameter=([^,]+),(.+)$", (FOLDER / "zabbix.conf").read_text("utf-8"), re.MULTILINE
    )
    commands = dict(lines)
    item = commands["coli.stat[*]"]

    def ask(name: str) -> subprocess.CompletedProcess[str]:
        return run(item.replace("$$", "\0").replace("$1", name).replace("\0", "$"), environment)

    assert (ask("ready").stdout, ask("ready").returncode) == ("1\n", 0)
    assert (ask("no_such_figure").stdout, ask("no_such_figure").returncode) == ("", 1)
    assert json.loads(run(commands["coli.all"], environment).stdout)["ready"] == 1
