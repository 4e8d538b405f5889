"""Programs that `coli bench speed` measures: processes that answer JSON lines, one for each engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coli_server.errors import ModelError
from coli_server.settings import SETTINGS

Enter = Callable[[], None]
"""What a child calls first, to come under a limit."""

DIRECT = ("--context", "256", "--direct")
"""Flags of a disk-bound engine: room of one short sequence, so that the rest is the experts'."""

PEER = Path(__file__).with_name("speed_peer.py")

# Set by some machines for all programs, and slow for NumPy's products; the peer's threads must not spin.
_UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def environment() -> Mapping[str, str]:
    """The environment of what is measured: settings of whoever measures must not reach it."""
    unset = {*_UNSET, *(setting.env for setting in SETTINGS.values())}
    return {name: value for name, value in os.environ.items() if name not in unset}


class Program:
    """A process that answers JSON lines. `started` is its first line, when it can work."""

    def __init__(self, command: Sequence[str], enter: Enter | None = None, *, quiet: bool = False) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
            stderr=subprocess.DEVNULL if quiet else None, preexec_fn=enter,
        )  # fmt: skip
        self.started = self._read()

    def ask(self, **task: Any) -> dict[str, Any]:
        """The answer to one task. Raises ModelError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
            raise ModelError(f"ended with status {self._process.wait()}: {command}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def coli(folder: Path, threads: int, *flags: str, enter: Enter | None = None) -> Program:
    """Coli's engine on `folder`. What it warns of is said: a read that is not direct, for example."""
    command = [sys.executable, "-m", "coli_server.bench.speed_worker", str(folder), "--threads", str(threads)]
    return Program([*command, *flags], enter)


def least_budget(folder: Path, threads: int, slots: int) -> int:
    """The least --ram in bytes with which Coli, reading directly, keeps so many experts of every layer.

    It depends on what a process takes before it has read a weight, so a process like it answers.
    """
    words = [str(folder), "--threads", str(threads), *DIRECT, "--experts-per-layer", str(slots)]
    with Program([sys.executable, "-m", "coli_server.bench.speed_worker", *words]) as program:
        return int(program.started["least"])


def disk_meter(folder: Path) -> Program:
    """What measures how fast the experts of `folder` can be read."""
    return Program([sys.executable, "-m", "coli_server.bench.speed_reads", str(folder)])


def peer(python: Path, file: Path, threads: int, enter: Enter | None = None) -> Program:
    """llama.cpp on `file`, by the interpreter that has it."""
    return Program([str(python), str(PEER), "run", str(file), str(threads)], enter, quiet=True)
