"""Real daemons in processes of their own, talked to from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from coli_server.settings import SETTINGS

# An extra of its own, and a large one: its tests are there where it is.
collect_ignore = [] if find_spec("lm_eval") else ["test_lm_eval.py"]
# Programs that a machine may have or not.
collect_ignore += [] if shutil.which("prometheus") else ["test_prometheus.py"]
collect_ignore += [] if shutil.which("haproxy") else ["test_haproxy.py"]

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "

# Settings of whoever runs the tests must not reach the daemons under test.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in {setting.env for setting in SETTINGS.values()}
}
ENVIRONMENT["COLI_HISTORY"] = "off"  # one test must not learn from another
ENVIRONMENT["COLI_METRICS_PORT"] = "0"  # many daemons run at the same time
ENVIRONMENT["COLI_CHAT_HISTORY"] = ""  # whoever runs the tests has one


@dataclass(frozen=True)
class Daemon:
    """A daemon that serves. `log` grows with what it says on standard error."""

    host: str
    port: int
    process: subprocess.Popen[str]
    log: list[str]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def stop(self) -> int:
        """SIGTERM, then its exit status."""
        self.process.terminate()
        return self.process.wait(60)


StartDaemon = Callable[..., AbstractContextManager[Daemon]]


@pytest.fixture(scope="session")
def start_daemon() -> StartDaemon:
    """`with start_daemon("--ram", "1G", CACHE_ROUTE="1") as daemon:` on a free port of the loopback."""
    return _running


@contextlib.contextmanager
def _running(*flags: str, **variables: str) -> Iterator[Daemon]:
    command = [sys.executable, "-P", "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **variables}, stdin=subprocess.DEVNULL
    )
    assert process.stderr is not None
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if match := re.match(r"READY (\S+):(\d+)\b", line):
                # From here on somebody must read, or a daemon that says much would stand still.
                threading.Thread(target=log.extend, args=(process.stderr,), daemon=True).start()
                yield Daemon(match[1], int(match[2]), process, log)
                break
        else:
            pytest.fail(f"the daemon ended with status {process.wait()}:\n{''.join(log)}")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights that can chat and has room for answers too long to wait for."""
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(ROOT / "tests/data/models/glm4_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 65_536
    config["eos_token_id"] = None  # random weights would end an answer anywhere
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@dataclass(frozen=True)
class Output:
    status: int
    out: str
    err: str


RunColi = Callable[..., Output]


@pytest.fixture(scope="session")
def run_coli() -> RunColi:
    """`run_coli("gen", "text", input="", CACHE_ROUTE="1")`: one command to its end."""

    def run(*words: str, input: str = "", **variables: str) -> Output:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "coli_server.cli", *words],
            input=input,
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, **variables},
            timeout=300,
        )
        return Output(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def clean_environment() -> Mapping[str, str]:
    """The environment without any setting of Coli."""
    return ENVIRONMENT
