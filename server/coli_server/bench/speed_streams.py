"""Bare connections to a daemon: generations, and when each line came; questions, and how long they took.

One thread reads all of them, with no more work a line than looking at the clock: the processors are the
daemon's.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from coli_server.errors import ModelError

PATIENCE = 60.0  # seconds without a line of any stream
IDS = range(100, 40_100)
"""Tokens that every model measured here has, and no control token."""


def story(number: int) -> str:
    """The beginning of a story, another one for each `number`."""
    return (
        f"Chapter {number + 1}. The old sailor sat down by the fire, looked at the others, and began to tell "
        "his story:"
    )


def prompt_ids(count: int, seed: int) -> list[int]:
    """Tokens without a meaning, others for each `seed`."""
    return [IDS[(7919 * i + 104_729 * seed) % len(IDS)] for i in range(count)]


class Stream:
    """One generation on a connection of its own. Times are those of `time.perf_counter`.

    `accepted`  when its ACK came
    `tokens`    when each piece of text came: a token each, but for characters that take several
    `words`     what DONE said, and None before; `ended` is when it came
    """

    def __init__(self, port: int, command: str) -> None:
        self.accepted: float | None = None
        self.tokens: list[float] = []
        self.words: dict[str, str] | None = None
        self.ended: float | None = None
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.socket.sendall(command.encode() + b"\n")
        self._rest = b""

    def read(self) -> None:
        """Take what has come. Raises ModelError where the request failed."""
        data = self.socket.recv(1 << 16)
        now = time.perf_counter()
        if not data:
            raise ModelError("the daemon has closed a connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match line.partition(b" ")[0]:
                case b"TOK":
                    self.tokens.append(now)
                case b"ACK":
                    self.accepted = now
                case b"DONE":
                    self.ended = now
                    self.words = dict(re.findall(r"(\w+)=(\S+)", line.decode()))
                case b"ERR":
                    raise ModelError(f"the daemon refused a request: {line.decode()}")

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between pieces of text, of those between `begin` and `end`."""
        inside = [at for at in self.tokens if begin <= at <= end]
        return [after - before for before, after in pairwise(inside)]


class Streams:
    """Generations at the same time. Leaving the context closes their connections, which cancels them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._all: list[Stream] = []

    def start(self, prompt: str | Sequence[int], tokens: int) -> Stream:
        """Continue a text, or token ids, greedily by `tokens`."""
        ids = "" if isinstance(prompt, str) else "ids=1 "
        text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
        stream = Stream(self._port, f"GEN max={tokens} {ids}{text}")
        self._selector.register(stream.socket, selectors.EVENT_READ, stream)
        self._all.append(stream)
        return stream

    def read_until(self, reached: Callable[[], bool]) -> float:
        """Read until it is so; when that was. Raises ModelError when nothing comes or all have ended."""
        while not reached():
            if all(stream.words is not None for stream in self._all):
                raise ModelError(f"answers ended early: {[stream.words for stream in self._all]}")
            ready = self._selector.select(PATIENCE)
            if not ready:
                raise ModelError(f"the daemon has been silent for {PATIENCE:g} s")
            for key, _ in ready:
                key.data.read()
        return time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        for stream in self._all:
            stream.socket.close()


class Line:
    """A connection for commands that are answered at once: PING, STAT."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def ask(self, command: str) -> str:
        """The whole answer."""
        last = b"END\n" if command.startswith("STAT") else b"\n"
        self._socket.sendall(command.encode() + b"\n")
        answer = b""
        while not answer.endswith(last):
            data = self._socket.recv(1 << 16)
            if not data:
                raise ModelError(f"the daemon closed the connection instead of answering {command}")
            answer += data
        return answer.decode()

    def seconds(self, command: str) -> float:
        """The time to the answer's last byte."""
        start = time.perf_counter()
        self.ask(command)
        return time.perf_counter() - start

    def close(self) -> None:
        self._socket.close()
