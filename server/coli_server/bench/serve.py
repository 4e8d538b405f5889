"""Load a running daemon with many clients, and tell what they saw: `coli bench serve`.

Closed loop (default): each client sends its next request when the last one is over. Open loop (--rate):
requests arrive by chance, as those of people do, and time counts from when one was due. Times are the
clients'. Afterwards the daemon's own counters must agree with what the clients counted: the exit status is 1
if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from coli_server.bench.checks import Footprint, broken_accounts, broken_invariants, quiet
from coli_server.bench.load import (
    Endpoint,
    Lengths,
    Link,
    LoadError,
    Mix,
    Sample,
    Tally,
    closed_loop,
    open_loop,
    samples_json,
)
from coli_server.errors import ConfigurationError
from coli_server.settings import SETTINGS, Address, Listen

QUANTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a load. Times in seconds; `good` requests were completed, within the goals if any."""

    model: str
    mode: str
    loop: str
    clients: int
    idle: int
    seconds: float
    requests: int
    completed: int
    refused: int
    failed: int
    vanished: int
    lost: int
    good: int
    requests_per_second: float
    good_per_second: float
    tokens_per_second: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    whole_request: dict[str, float]
    ends: dict[str, int]
    before: Footprint
    during: Footprint
    after: Footprint
    wrong: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    arguments = _parse(words)
    report, tally = asyncio.run(run(arguments))
    if arguments.samples is not None:
        arguments.samples.write_text(samples_json(tally) + "\n", "utf-8")
    print(json.dumps(asdict(report), indent=2) if arguments.json else render(report))
    return 1 if report.wrong else 0


def add_load_arguments(parser: argparse.ArgumentParser, *, clients: int) -> None:
    """Flags for where the daemon is and what is asked of it."""
    listen = SETTINGS["listen"]
    where = os.environ.get(listen.env) or str(listen.default)
    parser.add_argument(
        "--connect", default=where, metavar="ADDRESS", help=f"where the daemon listens [{listen.env}]"
    )
    parser.add_argument("--clients", type=int, default=clients, metavar="N", help=f"connections ({clients})")
    parser.add_argument("--prompt", default="32", metavar="N|N-M", help="tokens of a prompt (32)")
    parser.add_argument("--output", default="32", metavar="N|N-M", help="most tokens of an answer (32)")
    for name, help in (
        ("chat", "share of requests that are turns of a dialogue (0)"),
        ("slow", "share of clients that pause while they read (0)"),
        ("vanish", "share of requests whose client is killed before their end (0)"),
    ):
        parser.add_argument(f"--{name}", type=_share, default=0.0, metavar="SHARE", help=help)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def mix_of(arguments: argparse.Namespace) -> Mix:
    lengths = (Lengths.parse(arguments.prompt), Lengths.parse(arguments.output))
    return Mix(*lengths, arguments.chat, arguments.slow, arguments.vanish)


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    try:
        return Endpoint(Listen().parse(arguments.connect))
    except ValueError as error:
        raise ConfigurationError(f"--connect is {arguments.connect!r}, {error}") from None


async def run(arguments: argparse.Namespace) -> tuple[Report, Tally]:
    """Load the daemon and look at it before, during and afterwards."""
    endpoint, mix = endpoint_of(arguments), mix_of(arguments)
    watcher = await endpoint.connect()
    before = await quiet(watcher)
    with ExitStack() as stack:
        if arguments.idle:
            stack.enter_context(Crowd(endpoint.address, arguments.idle))
            await _until_connected(watcher, arguments.idle + 1)
        start = time.perf_counter()
        until = start + arguments.seconds if arguments.seconds else float("inf")
        common = {"clients": arguments.clients, "requests": arguments.requests, "until": until}
        seed = arguments.seed
        if arguments.rate:
            load = open_loop(endpoint, mix, rate=arguments.rate, seed=seed, **common)
        else:
            load = closed_loop(endpoint, mix, seed=seed, **common)
        loading = asyncio.create_task(load)
        during = await _busiest(watcher, loading)
        tally = await loading
        seconds = time.perf_counter() - start
    after = await quiet(watcher)
    wrong = [*broken_accounts(before, after, tally), *broken_invariants(after)]
    await watcher.quit()
    report = _report(arguments, tally, seconds, before, during, after, wrong)
    return report, tally


def _report(
    arguments: argparse.Namespace,
    tally: Tally,
    seconds: float,
    before: dict[str, str],
    during: Footprint,
    after: dict[str, str],
    wrong: list[str],
) -> Report:
    samples = tally.samples
    completed = [sample for sample in samples if sample.ended == "completed"]
    good = [sample for sample in completed if _is_good(sample, arguments)]
    ended = Counter(sample.ended for sample in samples)
    return Report(
        model=after["model"],
        mode=after["mode"],
        loop=f"open, {arguments.rate:g} requests/s" if arguments.rate else "closed",
        clients=arguments.clients,
        idle=arguments.idle,
        seconds=seconds,
        requests=len(samples),
        completed=len(completed),
        refused=ended["refused"],
        failed=ended["failed"],
        vanished=ended["vanished"],
        lost=ended["lost"],
        good=len(good),
        requests_per_second=len(completed) / seconds,
        good_per_second=len(good) / seconds,
        tokens_per_second=sum(sample.tokens for sample in completed) / seconds,
        first_token=quantiles([sample.first for sample in completed if sample.first is not None]),
        between_tokens=quantiles([gap for sample in completed for gap in sample.gaps]),
        whole_request=quantiles([sample.seconds for sample in completed]),
        ends=dict(Counter(sample.code for sample in samples if sample.code)),
        before=Footprint.of(before),
        during=during,
        after=Footprint.of(after),
        wrong=tuple(wrong),
    )


class Crowd:
    """Connections that do nothing, held by a process of their own so that this one stays as it is."""

    def __init__(self, address: Address, count: int) -> None:
        self._address = address
        self._count = count

    def __enter__(self) -> None:
        one = self._address
        family = "AF_INET" if one.path is None and ":" not in one.host else "AF_INET6"
        place = (one.host, one.port) if one.path is None else one.path
        family = "AF_UNIX" if one.path is not None else family
        code = (
            "import resource, socket, sys\n"
            "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
            f"made = [socket.socket(socket.{family}) for _ in range({self._count})]\n"
            f"for one in made: one.connect({place!r})\n"
            "sys.stdin.read()\n"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def _until_connected(watcher: Link, count: int) -> None:
    for _ in range(600):
        if int((figures := await watcher.stat())["connections_current"]) >= count:
            return
        await asyncio.sleep(0.1)
    raise LoadError(
        f"only {figures['connections_current']} of {count} connections were taken: "
        "see --max-connections of the daemon and its limit of open files"
    )


async def _busiest(watcher: Link, loading: asyncio.Task[Tally]) -> Footprint:
    """The footprint at the moment with the most connections."""
    most = Footprint.of(await watcher.stat())
    while not loading.done():
        await asyncio.wait({loading}, timeout=0.5)
        now = Footprint.of(await watcher.stat())
        most = max(most, now, key=lambda footprint: footprint.connections)
    return most


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank quantiles `p50`, `p90`, `p99` and `max`; empty without values."""
    ordered = sorted(values)
    names = {percent: "max" if percent == 100 else f"p{percent}" for percent in QUANTILES}
    return {
        name: ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
        for percent, name in names.items()
        if ordered
    }


def render(report: Report) -> str:
    """The report as lines for people."""
    lines = [
        f"{report.model}, {report.mode}: {report.loop} loop, {report.clients} clients, {report.idle} idle "
        f"connections, {report.seconds:.1f} s",
        f"{report.requests} requests: {report.completed} completed, {report.refused} refused, "
        f"{report.failed} failed, {report.vanished} left by their client, {report.lost} lost",
        f"{report.requests_per_second:.2f} requests/s, {report.good_per_second:.2f} good, "
        f"{report.tokens_per_second:.1f} tokens/s",
        "",
        f"{'milliseconds':<16}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max")),
    ]
    for name, values in (
        ("first token", report.first_token),
        ("between tokens", report.between_tokens),
        ("whole request", report.whole_request),
    ):
        lines.append(f"{name:<16}" + "".join(f"{value * 1000:>10.1f}" for value in values.values()))
    lines += ["", f"{'the daemon':<16}{'before':>14}{'during':>14}{'after':>14}"]
    before, during, after = asdict(report.before), asdict(report.during), asdict(report.after)
    for name in before:
        cells = (str("-" if one[name] is None else one[name]) for one in (before, during, after))
        lines.append(f"{name:<16}" + "".join(f"{cell:>14}" for cell in cells))
    lines += ["", *(report.wrong or ("every request has one last line, and all counters add up",))]
    return "\n".join(lines)


def _is_good(sample: Sample, arguments: argparse.Namespace) -> bool:
    first = sample.first is None or sample.first * 1000 <= arguments.first_ms
    mean = sum(sample.gaps) / len(sample.gaps) * 1000 if sample.gaps else 0.0
    return bool(first and mean <= arguments.token_ms)


def _share(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a share from 0 to 1")
    return value


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="coli bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load_arguments(parser, clients=16)
    parser.add_argument("--requests", type=int, default=256, metavar="N", help="requests in all (256)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="begin none after S seconds")
    parser.add_argument("--rate", type=float, default=0.0, metavar="R", help="open loop: R requests a second")
    parser.add_argument("--idle", type=int, default=0, metavar="N", help="connections that do nothing (0)")
    parser.add_argument(
        "--first-ms", type=float, default=float("inf"), metavar="MS", help="goal: time to the first token"
    )
    parser.add_argument(
        "--token-ms", type=float, default=float("inf"), metavar="MS", help="goal: mean time between tokens"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every request as a JSON line")
    arguments = parser.parse_args(words)
    if arguments.clients < 1 or arguments.requests < 1 or arguments.idle < 0 or arguments.rate < 0:
        raise ConfigurationError("--clients and --requests must be at least 1, --idle and --rate at least 0")
    return arguments
