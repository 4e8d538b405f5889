"""The disk-bound rows of `coli bench speed`: experts are read past the page cache while tokens are made."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coli_server.bench.speed_cgroup import limited
from coli_server.bench.speed_program import DIRECT, Program, coli, disk_meter, least_budget, peer
from coli_server.bench.speed_report import Report, Row
from coli_server.bench.speed_streams import prompt_ids
from coli_server.bench.windows import read_texts, windows_of
from coli_server.engine.model import Checkpoint
from coli_server.engine.text import Text
from coli_server.errors import ModelError

Answer = dict[str, Any]

ROUNDS, TOKENS, PROMPT, SETTLE = 3, 32, 4, 8
LIMITED_TOKENS, PEER_TOKENS = 16, 6
WINDOWS, WINDOW = 8, 128
OFF = {"mode": "off"}
CACHE_ROUTE = {"mode": "max-rank", "j": 2, "m": 24}
_SPARE = 150  # MiB between Coli's budget and a limit at which the system would end it


def disk(report: Report, folder: Path, threads: int) -> None:
    """The benchmark model with RAM for a quarter of its experts, against the disk."""
    experts = Checkpoint.open(folder).spec.moe.experts
    flags = _flags(least_budget(folder, threads, experts // 4), experts // 4)
    found: dict[str, list[Answer]] = {"stock": [], "cache_route": []}
    rates: list[float] = []
    with coli(folder, threads, *flags) as ours, disk_meter(folder) as meter:
        for number in range(ROUNDS):
            rates.append(_disk_rate(meter, folder))
            _take_turns(ours, found, folder, number, TOKENS)
        ram, slots = ours.started["ram"], ours.started["slots"]
    limit = statistics.median(rates)
    report.measured |= {"disk_read": limit, "disk_reads": rates, "disk": found}
    stock, routed = (_speeds(found[name]) for name in ("stock", "cache_route"))
    allowed = [TOKENS / (answer["bytes"] / limit) for answer in found["stock"]]
    some = f"disk-bound, {slots} of {experts} experts a layer in memory"
    report.rows += [
        Row.against(f"{some}: decode against the disk, tokens/s", stock, allowed, 0.8),
        Row.against(
            f"{some}: CACHE_ROUTE J=2 M=24 against stock (uniform routing), tokens/s", routed, stock, None
        ),
        _memory(some, found, ram),
    ]


def disk_against_peer(
    report: Report, folder: Path, threads: int, python: Path, file: Path, group: Path, mebibytes: int
) -> None:
    """The benchmark model and the peer, which maps its `file`, one after the other under one memory limit."""
    found: dict[str, list[Answer]] = {"stock": [], "cache_route": []}
    with limited(group, mebibytes) as enter:
        flags = _flags((mebibytes - _SPARE) << 20, None)
        with coli(folder, threads, *flags, enter=enter) as ours:
            for number in range(ROUNDS):
                _take_turns(ours, found, folder, number, LIMITED_TOKENS)
            started = ours.started
        forget(file)
        with peer(python, file, threads, enter) as theirs:
            theirs.ask(do="prefill", ids=[1, 2])
            seconds = theirs.ask(do="decode", ids=prompt_ids(PEER_TOKENS, 0))["seconds"]
            report.peer = str(theirs.started["version"])
    report.measured |= {"limited": found, "limited_peer": seconds}
    some = f"limit of {mebibytes} MiB ({started['slots']} of {started['experts']} experts a layer): decode"
    for name, words, goal in (("stock", "", 10), ("cache_route", " with CACHE_ROUTE J=2 M=24", 14)):
        row = Row.against(f"{some}{words}, tokens/s", _speeds(found[name]), [PEER_TOKENS / seconds], goal)
        report.rows.append(row)


def default_disk(report: Report, folder: Path, threads: int, texts: Sequence[Path]) -> None:
    """The default model with RAM for half of its experts: CACHE_ROUTE=1 against 0 on the same text.

    Once with the default window of 12 ranks, once with all ranks. The text is fed token by token
    (`bench.decode`), so all decode the same tokens; they take turns.
    """
    experts = Checkpoint.open(folder).spec.moe.experts
    windows = windows_of(Text.load(folder), read_texts(texts), WINDOWS, WINDOW)
    arms = {"A": "J=2 M=12", "widest": f"J=2 M={experts}"}
    found: dict[str, list[Answer]] = {"stock": [], "all": [], **{name: [] for name in arms}}
    rates: list[float] = []
    flags = _flags(least_budget(folder, threads, experts // 2), experts // 2)
    with coli(folder, threads, *flags) as ours, disk_meter(folder) as meter:
        for turn, window in enumerate(windows):
            rates.append(_disk_rate(meter, folder))
            answer = ours.ask(do="arms", window=window, turn=turn)
            found["all"].append(_from_disk(answer, folder))
            for name in ("stock", *arms):
                found[name].append(answer[name])
        prices, ram, slots = ours.ask(do="price"), ours.started["ram"], ours.started["slots"]
    limit = statistics.median(rates)
    report.measured |= {"default_disk_read": limit, "default_disk_reads": rates, "default_disk": found}
    report.measured["default_disk_prices"] = prices
    some = f"default model, disk-bound, {slots} of {experts} experts a layer in memory"
    allowed = [answer["tokens"] / (answer["bytes"] / limit) for answer in found["stock"]]
    for name, words in arms.items():
        report.rows += _arm_rows(
            f"{some}: CACHE_ROUTE=1 ({words})", found[name], found["stock"], prices[name]
        )
    report.rows += [
        Row.against(
            f"{some}: CACHE_ROUTE=0 against the disk, tokens/s", _speeds(found["stock"]), allowed, None
        ),
        _memory(some, {"all": found["all"]}, ram),
    ]


def _arm_rows(name: str, routed: Sequence[Answer], stock: Sequence[Answer], price: Answer) -> list[Row]:
    """What one setting of CACHE_ROUTE brings and costs."""
    increase = price["increase"]
    return [
        Row.against(f"{name} against 0, tokens/s (aim: 2)", _speeds(routed), _speeds(stock), 1.37),
        Row(
            "its price: perplexity, % more (95 % interval)",
            increase["value"], None, None, None, (increase["low"], increase["high"]),
        ),
        Row.against("its bytes read a token", _bytes_a_token(routed), _bytes_a_token(stock), None),
    ]  # fmt: skip


def forget(file: Path) -> None:
    """Let the page cache give up a file.

    Who reads what another group has read is not charged for it: a limit would not count.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _flags(ram: int, slots: int | None) -> list[str]:
    flags = [*DIRECT, "--ram", str(ram)]
    return flags if slots is None else [*flags, "--experts-per-layer", str(slots)]


def _take_turns(
    ours: Program, found: Mapping[str, list[Answer]], folder: Path, number: int, tokens: int
) -> None:
    """One turn of stock routing and one of CACHE_ROUTE, on other tokens with every `number`."""
    for name, policy in (("stock", OFF), ("cache_route", CACHE_ROUTE)):
        ours.ask(do="policy", policy=policy)
        ids = prompt_ids(PROMPT + SETTLE + tokens, number)
        ours.ask(do="prefill", ids=ids[:PROMPT])
        ours.ask(do="decode", ids=ids[PROMPT : PROMPT + SETTLE])
        answer = _from_disk(ours.ask(do="decode", ids=ids[PROMPT + SETTLE :]), folder)
        found[name].append({**answer, "tokens": tokens})


def _speeds(answers: Sequence[Answer]) -> list[float]:
    return [answer["tokens"] / answer["seconds"] for answer in answers]


def _bytes_a_token(answers: Sequence[Answer]) -> list[float]:
    return [answer["bytes"] / answer["tokens"] for answer in answers]


def _memory(name: str, found: Mapping[str, Sequence[Answer]], ram: int) -> Row:
    peak = max(answer["rss"] for answers in found.values() for answer in answers)
    return Row.within(f"{name}: most memory against --ram, load time included, bytes", peak, ram, 1.05)


def _disk_rate(meter: Program, folder: Path) -> float:
    return float(_from_disk(meter.ask(), folder)["rate"])


def _from_disk(answer: Answer, folder: Path) -> Answer:
    """`answer`, whose `bytes` must have come from the disk; ModelError where the page cache gave them."""
    stored, nbytes = answer["stored"], answer["bytes"]
    if stored is not None and stored < 0.99 * nbytes:
        raise ModelError(
            f"{folder}: only {stored} of {nbytes} bytes came from the disk: "
            "its file system has no direct reads"
        )
    return answer
