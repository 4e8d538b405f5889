"""A daemon for `coli bench speed`, and how fast its sessions decode together."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coli_server.bench.speed_program import environment
from coli_server.bench.speed_reads import resident_bytes
from coli_server.bench.speed_streams import Line, Streams, prompt_ids, story
from coli_server.errors import ModelError

TOKENS = 32
CONTEXT = 2560
MOST_CONNECTIONS = 1100
WARM_UP_IDS = 1000


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to serve: its `name` in the report, the daemon's `ram` in bytes.

    `sessions_goal` is what 8 sessions must make of the tokens/s of one. A model of `random` weights gets
    prompts without meaning, as different as can be: behind similar texts it would say the same.
    """

    name: str
    folder: Path
    ram: int
    threads: int
    sessions_goal: float
    random: bool

    def prompt(self, number: int) -> str | list[int]:
        """Another one for each `number`, that the model does not soon end."""
        return prompt_ids(24, 1000 + number) if self.random else story(number)


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that serves. `seconds` it took to say so."""

    port: int
    process: subprocess.Popen[str]
    seconds: float

    def memory(self, figure: str) -> int:
        """VmRSS, what it has in RAM, or VmHWM, the most that it has had there, in bytes."""
        return resident_bytes(figure, self.process.pid)

    def rest(self, idle: int = 0) -> None:
        """Wait until nothing runs, and no connection but `idle` ones is open."""
        line = Line(self.port)
        try:
            for _ in range(600):
                figures = dict(re.findall(r"^STAT (\S+) (\S+)$", line.ask("STAT"), re.MULTILINE))
                busy = int(figures["requests_running"]) + int(figures["requests_waiting"])
                if not busy and int(figures["connections_current"]) == idle + 1:
                    return
                time.sleep(0.05)
        finally:
            line.close()
        raise ModelError("the daemon does not come to rest")

    def load(self) -> None:
        """Let it read two long prompts: what they touch is in memory then, and every kernel has run."""
        with Streams(self.port) as streams:
            reading = [streams.start(prompt_ids(WARM_UP_IDS, seed), 2) for seed in range(2)]
            streams.read_until(lambda: all(stream.words is not None for stream in reading))
        self.rest()


@contextmanager
def serving(subject: Subject) -> Iterator[Daemon]:
    """A daemon of its own: no history, no port for metrics, none of the settings of who measures."""
    command = [sys.executable, "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--model", str(subject.folder), "--ram", str(subject.ram), "--threads", str(subject.threads)]
    command += ["--context", str(CONTEXT), "--max-connections", str(MOST_CONNECTIONS), "--history", "off"]
    command += ["--metrics-port", "0", "--log-level", "error"]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment()
    )
    try:
        yield Daemon(_ready(process), process, time.perf_counter() - start)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # how it ends is not measured here
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[str]) -> int:
    """The daemon's port, once it says so; from then on somebody reads what it says."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if match := re.match(r"READY \S+:(\d+)\b", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return int(match[1])
    raise ModelError(f"the daemon ended with status {process.wait()}: {''.join(said)}")


def together(daemon: Daemon, subject: Subject, sessions: int, idle: int = 0) -> float:
    """Tokens a second of sessions that decode together: while all of them do, their prompts read.

    `idle` other connections are open.
    """
    with Streams(daemon.port) as streams:
        running = [streams.start(subject.prompt(number), TOKENS) for number in range(sessions)]
        streams.read_until(lambda: all(stream.words is not None for stream in running))
    daemon.rest(idle)
    begin = max(stream.tokens[0] for stream in running)
    end = min(stream.tokens[-1] for stream in running)
    made = sum(begin < at <= end for stream in running for at in stream.tokens)
    if made < sessions * TOKENS // 2:
        raise ModelError(f"{sessions} answers hardly ran together: {made} of {sessions * TOKENS} tokens")
    return made / (end - begin)
