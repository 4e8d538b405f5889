"""Speed against a peer, llama.cpp, and against what memory and disk allow, all measured in one run.

Both read the same tensors, in turns (A B A B): medians, with the least and the most. Nothing else may run
meanwhile. The benchmark model is made on the first run: 7 GB for 8 layers, and as much again for the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli_server.bench.speed_daemon import daemon_rows
from coli_server.bench.speed_model import EXPERTS, VOCAB, make_gguf, make_model
from coli_server.bench.speed_report import Report, Row
from coli_server.errors import ConfigurationError, ModelError
from coli_server.models.convert import Conversion, convert
from coli_server.settings import cache_folder

PARTS = ("prefill16", "prefill8", "prefill4", "decode16", "decode8", "decode4", "disk", "daemon")
GOALS = {"decode16": 1.0, "decode8": 1.0, "decode4": 0.9, "prefill16": 1.3, "prefill8": 1.0, "prefill4": 1.0}
PEER_FILES = {16: "bf16", 8: "q8_0", 4: "q4_0"}
PROMPT, TOKENS, ROUNDS = 256, 32, 3
PEER_DISK_TOKENS = 6
_SPARE = 150  # MiB between Coli's budget and a limit at which the system would end it
CACHE_ROUTE = {"mode": "max-rank", "j": 2, "m": 24}

# Set by some machines for all programs, and slow for NumPy's products; the peer's threads must not spin.
_UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="coli bench speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--folder", type=Path, help="where the models are kept (the cache folder)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of the benchmark model (8)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of both programs (2)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="an interpreter that has llama-cpp-python; none: no peer"
    )
    parser.add_argument(
        "--cgroup",
        type=Path,
        metavar="FOLDER",
        help="a memory cgroup: for `disk` one with a limit is made in it",
    )
    parser.add_argument("--limit", type=int, default=2500, metavar="MIB", help="that limit (2500)")
    parser.add_argument("--make", action="store_true", help="make the models of the parts, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    arguments = parser.parse_args(words)
    parts = arguments.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigurationError(f"--only={unknown[0]}: there are {', '.join(PARTS)}")
    folder = arguments.folder or cache_folder() / "bench"
    models = Models(folder, arguments.layers, arguments.peer)
    for bits in sorted({_bits(part) for part in parts}, reverse=True):
        models.coli(bits)
        if arguments.peer is not None:
            models.peer(bits)
    if arguments.make:
        return 0
    report = measure(parts, models, arguments)
    text = report.markdown()
    print(text)
    for file, content in ((arguments.markdown, text + "\n"), (arguments.json, report.json())):
        if file is not None:
            file.write_text(content)
    return 0


def _bits(part: str) -> int:
    return int(digits) if (digits := part.lstrip("abcdefghijklmnopqrstuvwxyz")) else 16


def _say(text: str) -> None:
    print(f"coli: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Models:
    """The benchmark model in every form, made when it is asked for."""

    folder: Path
    layers: int
    python: Path | None

    def coli(self, bits: int) -> Path:
        """Coli's folder; in 8 and 4 bits, all matrices but router and embeddings are of 8 bits or fewer."""
        source = make_model(self.folder, self.layers, _say)
        if bits == 16:
            return source
        made = source.with_name(f"{source.name}-{bits}bit")
        if not made.exists():
            _say(f"converting to {bits} bits")
            convert(source, made, Conversion(bits, group=32 if bits == 8 else 64))
        return made

    def peer(self, bits: int) -> Path:
        """The peer's file, made by its own program."""
        source = make_gguf(make_model(self.folder, self.layers, _say), _say)
        made = source.with_name(source.name.replace("bf16", PEER_FILES[bits]))
        if not made.exists():
            _say(f"making {made.name}")
            part = made.with_name(made.name + ".partial")
            command = [str(self.python), str(_PEER), "quantize", str(source), str(part), PEER_FILES[bits]]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            part.replace(made)
        return made


_PEER = Path(__file__).with_name("speed_peer.py")


class Program:
    """A process that answers JSON lines."""

    def __init__(self, command: Sequence[str], enter: Callable[[], None] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _UNSET}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment, preexec_fn=enter,
        )  # fmt: skip
        self.started = self._read()

    def ask(self, **task: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
            raise ModelError(f"ended with status {self._process.wait()}: {command}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def coli(folder: Path, threads: int, *flags: str, enter: Callable[[], None] | None = None) -> Program:
    command = [sys.executable, "-m", "coli_server.bench.speed_worker", str(folder), "--threads", str(threads)]
    return Program([*command, *flags], enter)


def peer(models: Models, bits: int, threads: int, enter: Callable[[], None] | None = None) -> Program | None:
    if models.python is None:
        return None
    return Program([str(models.python), str(_PEER), "run", str(models.peer(bits)), str(threads)], enter)


def measure(parts: Sequence[str], models: Models, arguments: Any) -> Report:
    """Run the parts, those of the same weights together."""
    report = Report(machine=_machine(), command="coli bench speed " + " ".join(sys.argv[3:]))
    for bits in (16, 8, 4):
        some = [part for part in parts if part in (f"prefill{bits}", f"decode{bits}")]
        if some:
            _say(f"resident, {bits} bits")
            with ExitStack() as stack:
                resident(report, some, bits, models, arguments.threads, stack)
    if "disk" in parts:
        _say("disk-bound")
        with limited(arguments.cgroup, arguments.limit) as enter:
            ram = "8G" if enter is None else f"{arguments.limit - _SPARE}M"
            disk(report, models, arguments.threads, ram, enter)
    if "daemon" in parts:
        _say("daemon")
        report.rows += daemon_rows(models.coli(16), arguments.threads)
    return report


def resident(
    report: Report, parts: Sequence[str], bits: int, models: Models, threads: int, stack: ExitStack
) -> None:
    """Prefill and decode with everything in memory, in turns with the peer."""
    ours = coli(models.coli(bits), threads, "--ram", "12G")
    stack.callback(ours.close)
    theirs = peer(models, bits, threads)
    if theirs is not None:
        stack.callback(theirs.close)
        report.peer = str(theirs.started["version"])
    prompt = [(7 * i + 3) % VOCAB for i in range(PROMPT)]
    programs = [program for program in (ours, theirs) if program is not None]
    first = [program.ask(do="prefill", ids=prompt) for program in programs]  # and every expert is loaded
    if theirs is not None and bits == 16:
        report.rows.append(_same_logits(first[0]["logits"], first[1]["logits"]))
    seconds: dict[tuple[str, int], list[float]] = {}
    token = 0
    for _ in range(ROUNDS):
        for part in parts:
            for number, program in enumerate(programs):
                if part.startswith("prefill"):
                    answer = program.ask(do="prefill", ids=prompt)
                else:
                    program.ask(do="prefill", ids=prompt[:16])
                    ids = [(11 * i + token) % VOCAB for i in range(TOKENS)]
                    answer = program.ask(do="decode", ids=ids)
                seconds.setdefault((part, number), []).append(answer["seconds"])
            token += TOKENS
    limit = ours.ask(do="memory")["rate"]
    report.measured[f"memory_read_{bits}"] = limit
    for part in parts:
        tokens = PROMPT if part.startswith("prefill") else TOKENS
        rates = [[tokens / s for s in seconds[part, number]] for number in range(len(programs))]
        report.measured[part] = rates
        row = Row.against(f"{part}, tokens/s", rates[0], rates[1] if theirs else None, GOALS[part])
        report.rows.append(row)


def _same_logits(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Whether both programs compute the same function: the cosine of the angle between their logits."""
    dot = sum(a * b for a, b in zip(ours, theirs, strict=True))
    size = (sum(a * a for a in ours) * sum(b * b for b in theirs)) ** 0.5
    return Row("agreement of logits with the peer's (cosine)", dot / size, 1.0, dot / size, 0.99)


def disk(report: Report, models: Models, threads: int, ram: str, enter: Callable[[], None] | None) -> None:
    """RAM for a quarter of the experts, read past the page cache; the peer with mmap under the same limit."""
    quarter = ("--ram", ram, "--experts-per-layer", str(EXPERTS // 4), "--direct")
    ours = coli(models.coli(16), threads, *quarter, enter=enter)
    try:
        limit = ours.ask(do="disk")["rate"]
        ours.ask(do="prefill", ids=list(range(1, 17)))
        stock = [ours.ask(do="decode", ids=_tokens(n)) for n in range(ROUNDS)]
        ours.ask(do="policy", policy=CACHE_ROUTE)
        ours.ask(do="prefill", ids=list(range(1, 17)))
        routed = [ours.ask(do="decode", ids=_tokens(n)) for n in range(ROUNDS + 1)][1:]
    finally:
        ours.close()
    report.measured |= {"disk_read": limit, "disk_stock": stock, "disk_cache_route": routed}
    rates = [TOKENS / answer["seconds"] for answer in stock]
    allowed = [TOKENS / (answer["bytes"] / limit) for answer in stock]
    report.rows.append(Row.against("disk-bound decode against the disk, tokens/s", rates, allowed, 0.8))
    faster = [TOKENS / answer["seconds"] for answer in routed]
    theirs = _peer_on_disk(models, threads, enter)
    for name, values, goal in (("disk-bound decode", rates, 10), ("with CACHE_ROUTE J=2 M=24", faster, 14)):
        report.rows.append(Row.against(f"{name}, tokens/s", values, theirs, goal))
    report.rows.append(Row.against("CACHE_ROUTE against stock (uniform routing)", faster, rates, None))


def _peer_on_disk(models: Models, threads: int, enter: Callable[[], None] | None) -> list[float] | None:
    """Only under a limit: without one the page cache holds the whole file."""
    if enter is None or (theirs := peer(models, 16, threads, enter)) is None:
        return None
    try:
        theirs.ask(do="prefill", ids=[1, 2])
        answer = theirs.ask(do="decode", ids=_tokens(0)[:PEER_DISK_TOKENS])
    finally:
        theirs.close()
    return [PEER_DISK_TOKENS / answer["seconds"]]


def _tokens(number: int) -> list[int]:
    return [(13 * i + 997 * number) % VOCAB for i in range(TOKENS)]


@contextmanager
def limited(parent: Path | None, mebibytes: int) -> Iterator[Callable[[], None] | None]:
    """What a child calls first to have at most so much memory, page cache included; None without a cgroup."""
    if parent is None:
        yield None
        return
    group = parent / f"coli-bench-{os.getpid()}"
    group.mkdir()
    try:
        old = group / "memory.limit_in_bytes"
        (old if old.exists() else group / "memory.max").write_text(str(mebibytes << 20))
        yield lambda: _join(group)
    finally:
        time.sleep(1)
        group.rmdir()


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _machine() -> str:
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}"
