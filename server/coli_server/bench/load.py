"""Clients that load a daemon over its line protocol, and what they saw: a sample for each request.

Bare lines instead of the client library: these clients also stall, vanish, and count every line that comes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import re
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coli_server.errors import ColiError, ConfigurationError
from coli_server.settings import Address

Ended = Literal["completed", "refused", "failed", "vanished", "lost"]

# Longer than any daemon is silent about a request: it tells of progress every two seconds.
PATIENCE = 60.0
_LOWEST_TOKEN, _TOKENS = 32, 200  # ids that every vocabulary has, and no control token


class LoadError(ColiError):
    """The daemon cannot be measured: it is not there, or it wants a token."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, drawn so that every factor of two between the bounds is as likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, word: str) -> Lengths:
        """From `N` or `N-M`; raises ConfigurationError."""
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", word, re.ASCII)
        if match and 0 < int(match[1]) <= int(match[2] or match[1]):
            return cls(int(match[1]), int(match[2] or match[1]))
        raise ConfigurationError(f"a length is {word!r}, must be N or N-M tokens, from 1 on")

    def draw(self, rng: random.Random) -> int:
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(round(drawn), self.low), self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Mix:
    """What is asked for, and by whom: shares from 0 to 1.

    `chat` of the requests are turns of a dialogue, `slow` of the clients pause while they read, `vanish` of
    the requests are left by a reset of the connection before their end.
    """

    prompt: Lengths
    output: Lengths
    chat: float = 0.0
    slow: float = 0.0
    vanish: float = 0.0


@dataclass(slots=True)
class Sample:
    """One request as its client saw it, in seconds from when it was due to be sent."""

    due: float
    ended: Ended = "lost"
    code: str = ""
    acknowledged: bool = False
    tokens: int = 0
    prompt_tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """Everything that the clients saw. `strays` are lines that nothing had asked for."""

    samples: list[Sample] = field(default_factory=list)
    strays: int = 0
    reconnects: int = 0


class Endpoint:
    """Where the daemon is, and how to get in: COLI_TOKEN and COLI_CAFILE as for the command line."""

    def __init__(self, address: Address, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self._token = environ.get("COLI_TOKEN", "")
        self._tls: ssl.SSLContext | None = None
        if address.path is None and "COLI_CAFILE" in environ:
            self._tls = ssl.create_default_context(cafile=environ["COLI_CAFILE"] or None)

    async def connect(self) -> Link:
        """A connection that may ask for anything. Raises LoadError."""
        try:
            if self.address.path is not None:
                reader, writer = await asyncio.open_unix_connection(self.address.path, limit=1 << 20)
            else:
                reader, writer = await asyncio.open_connection(
                    self.address.host, self.address.port, ssl=self._tls, limit=1 << 20
                )
        except OSError as error:
            raise LoadError(f"cannot connect to {self.address}: {error.strerror or error}") from None
        link = Link(reader, writer)
        if self._token and (answer := await link.ask(f"AUTH {self._token}")) != "OK":
            raise LoadError(f"{self.address} does not take the token of COLI_TOKEN: {answer}")
        return link


class Link:
    """One connection: lines out, lines in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, line: str) -> None:
        self._writer.write(f"{line}\n".encode())

    async def line(self) -> str:
        """The next line; empty when the connection has ended or nothing comes any more."""
        try:
            data = await asyncio.wait_for(self._reader.readline(), PATIENCE)
        except (OSError, ValueError, TimeoutError):
            return ""
        return data.decode(errors="replace").rstrip("\r\n")

    async def ask(self, command: str) -> str:
        self.send(command)
        return await self.line()

    async def stat(self, section: str = "") -> dict[str, str]:
        """The figures of a STAT. Raises LoadError when they are refused."""
        self.send(f"STAT {section}")
        figures: dict[str, str] = {}
        while (line := await self.line()) != "END":
            word, _, rest = line.partition(" ")
            if word != "STAT":
                raise LoadError(f"STAT was answered with {line[:200]!r}")
            name, _, value = rest.partition(" ")
            figures[name] = value
        return figures

    def vanish(self) -> None:
        """Reset the connection."""
        one: Any = self._writer.get_extra_info("socket")
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def quit(self) -> int:
        """Leave; the number of lines that came and that nothing had asked for."""
        self.send("QUIT")
        strays = 0
        while await self.line() not in ("OK bye", ""):
            strays += 1
        self._writer.close()
        return strays


class Client:
    """Sends one request after another, and connects again when a connection has ended."""

    def __init__(self, endpoint: Endpoint, mix: Mix, rng: random.Random, tally: Tally) -> None:
        self._endpoint = endpoint
        self._mix = mix
        self._rng = rng
        self._tally = tally
        self._link: Link | None = None
        self._slow = rng.random() < mix.slow
        self._ids = itertools.count(1)

    async def request(self, due: float) -> Sample:
        """One request that should have been sent at `due` (`time.perf_counter()`), to its end."""
        sample = Sample(due)
        self._tally.samples.append(sample)
        if self._link is None:
            self._link = await self._endpoint.connect()
            self._tally.reconnects += 1
        leave_after = self._rng.randrange(8) if self._rng.random() < self._mix.vanish else None
        id = f"r{next(self._ids)}"
        self._link.send(self._command(id))
        await self._follow(self._link, id, sample, leave_after)
        sample.seconds = time.perf_counter() - due
        if sample.ended in ("vanished", "lost"):
            self._link.vanish()
            self._link = None
        return sample

    async def close(self) -> None:
        if self._link is not None:
            self._tally.strays += await self._link.quit()
            self._link = None

    def _command(self, id: str) -> str:
        length, most = self._mix.prompt.draw(self._rng), self._mix.output.draw(self._rng)
        if self._rng.random() < self._mix.chat:
            words = " ".join(self._rng.choices(("tell", "me", "why", "the", "sky", "is", "blue"), k=length))
            return f"CHAT id={id} max={most} {words}"
        ids = ",".join(str(_LOWEST_TOKEN + self._rng.randrange(_TOKENS)) for _ in range(length))
        return f"GEN id={id} max={most} ids=1 {ids}"

    async def _follow(self, link: Link, id: str, sample: Sample, leave_after: int | None) -> None:
        last = sample.due
        for number in itertools.count():
            if number == leave_after:
                sample.ended = "vanished"
                return
            line = await link.line()
            now = time.perf_counter()
            word, _, rest = line.partition(" ")
            if word == "TOK" and rest.startswith(f"{id} "):
                if sample.first is None:
                    sample.first = now - sample.due
                else:
                    sample.gaps.append(now - last)
                last = now
                if self._slow and self._rng.random() < 0.1:
                    await asyncio.sleep(self._rng.uniform(0.05, 0.3))
            elif word == "ACK" and rest.startswith(f"{id} "):
                sample.acknowledged = True
            elif word == "DONE" and rest.startswith(f"{id} "):
                fields = dict(re.findall(r"(\w+)=(\S+)", rest))
                sample.ended, sample.code = "completed", fields["finish"]
                sample.tokens, sample.prompt_tokens = int(fields["tokens"]), int(fields["prompt_tokens"])
                return
            elif word == "ERR":
                sample.code = rest.partition(" ")[0]
                later = sample.code in ("BUSY", "DRAINING", "TOO_MANY_CLIENTS")
                sample.ended = "refused" if later else "failed"
                return
            elif not line:
                return
            elif word != "INFO":
                self._tally.strays += 1


async def closed_loop(
    endpoint: Endpoint, mix: Mix, *, clients: int, requests: int, until: float, seed: int
) -> Tally:
    """`clients` that send a request when their last one is over: `requests` in all, none after `until`."""
    tally, left = Tally(), itertools.count()

    async def work(number: int) -> None:
        client = Client(endpoint, mix, random.Random(f"{seed}/{number}"), tally)
        while next(left) < requests and time.perf_counter() < until:
            sample = await client.request(time.perf_counter())
            if sample.ended == "refused":
                await asyncio.sleep(0.1)
        await client.close()

    await asyncio.gather(*(work(number) for number in range(clients)))
    return tally


async def open_loop(
    endpoint: Endpoint, mix: Mix, *, clients: int, rate: float, requests: int, until: float, seed: int
) -> Tally:
    """Requests that arrive by chance, `rate` a second (Poisson), whether or not earlier ones are over.

    At most `clients` connections: who finds none waits, and that counts as time of the request.
    """
    tally, rng = Tally(), random.Random(seed)
    idle: asyncio.LifoQueue[Client] = asyncio.LifoQueue()
    made = [Client(endpoint, mix, random.Random(f"{seed}/{number}"), tally) for number in range(clients)]
    for client in made:
        idle.put_nowait(client)

    async def visit(due: float) -> None:
        client = await idle.get()
        await client.request(due)
        idle.put_nowait(client)

    visits: list[asyncio.Task[None]] = []
    due = time.perf_counter()
    while len(visits) < requests and due < until:
        await asyncio.sleep(due - time.perf_counter())
        visits.append(asyncio.create_task(visit(due)))
        due += rng.expovariate(rate)
    await asyncio.gather(*visits)
    for client in made:
        await client.close()
    return tally


def samples_json(tally: Tally) -> str:
    """Every sample, for whoever wants to look closer: one JSON object a line."""
    names = ("due", "ended", "code", "tokens", "prompt_tokens", "first", "seconds")
    return "\n".join(json.dumps({name: getattr(sample, name) for name in names}) for sample in tally.samples)
