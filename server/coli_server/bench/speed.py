"""Speed against a peer, llama.cpp, and against what memory and disk allow, all measured in one run.

Both read the same tensors, in turns (A B A B): medians, with the least and the most. Nothing else may run
meanwhile. The benchmark model is made on the first run: 7 GB for 8 layers, and as much again for the peer.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coli_server.bench.speed_cgroup import memory_group
from coli_server.bench.speed_daemon import daemon_rows, start_row
from coli_server.bench.speed_disk import default_disk, disk, disk_against_peer
from coli_server.bench.speed_model import VOCAB, make_gguf, make_model
from coli_server.bench.speed_overhead import overhead
from coli_server.bench.speed_pace import pace
from coli_server.bench.speed_program import PEER, coli, peer
from coli_server.bench.speed_report import Report, Row
from coli_server.bench.speed_serving import Subject
from coli_server.engine.kernels import check_bfloat16_dots
from coli_server.errors import ColiError, ConfigurationError
from coli_server.models import ensure_default_model
from coli_server.models.convert import Conversion, convert
from coli_server.settings import cache_folder

PARTS = (
    "prefill16", "prefill8", "prefill4", "decode16", "decode8", "decode4", "prefill-rounded16",
    "decode-rounded16", "overhead", "disk", "default-disk", "daemon", "default-daemon", "pace",
)  # fmt: skip
BOTH = ("overhead", "pace")
GOALS = {
    "decode16": 1.0, "decode8": 1.0, "decode4": 0.9, "decode-rounded16": 1.0,
    "prefill16": 1.3, "prefill8": 1.0, "prefill4": 1.0, "prefill-rounded16": 1.3,
}  # fmt: skip
PEERED = (*GOALS, "disk")
PEER_FILES = {16: "bf16", 8: "q8_0", 4: "q4_0"}
PROMPT, TOKENS, ROUNDS = 256, 32, 3
RAM, DEFAULT_RAM = 10 << 30, 2 << 30  # of daemons on the benchmark model and on the default one
UNIFORM = (
    "The benchmark model has random weights, and those route uniformly: hit rates of its experts, and what "
    "CACHE_ROUTE gains on it, say nothing about a trained model."
)


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
        metavar="FOLDER|auto",
        help="a memory cgroup: for `disk` and the peer one with a limit is made in it; auto: this process's",
    )
    parser.add_argument("--limit", type=int, default=2500, metavar="MIB", help="that limit (2500)")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts for `default-disk` (default: those that the default model's makers kept for it)",
    )
    parser.add_argument("--make", action="store_true", help="make the models of the parts, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    arguments = parser.parse_args(words)
    parts = arguments.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigurationError(f"--only={unknown[0]}: there are {', '.join(PARTS)}")
    group = memory_group(arguments.cgroup)
    models = Models(arguments.folder or cache_folder() / "bench", arguments.layers, arguments.peer)
    _make(parts, models)
    if arguments.make:
        return 0
    report = Report(machine=_machine(), command=" ".join(["coli bench speed", *words]))
    conditions = Conditions(arguments.threads, group, arguments.limit, arguments.text)
    measure(report, parts, models, conditions)
    text = report.markdown()
    print(text)
    for file, content in ((arguments.markdown, text + "\n"), (arguments.json, report.json())):
        if file is not None:
            file.write_text(content)
    return int(bool(report.failed))


def _make(parts: Sequence[str], models: Models) -> None:
    """Make the models that the parts need, before anything is measured."""
    benchmark = [part for part in parts if _needs(part, "benchmark")]
    for bits in sorted({_bits(part) for part in benchmark}, reverse=True):
        models.coli(bits)
        if models.python is not None and any(_bits(part) == bits for part in benchmark if part in PEERED):
            models.peer(bits)
    if any(_needs(part, "default") for part in parts):
        _say(f"default model: {models.default}")


def _needs(part: str, model: str) -> bool:
    """Whether a part measures the `benchmark` or the `default` model."""
    return part in BOTH or (model == "default") == part.startswith("default-")


def _bits(part: str) -> int:
    return int(digits) if (digits := part.lstrip("abcdefghijklmnopqrstuvwxyz-")) else 16


def _say(text: str) -> None:
    print(f"coli: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Models:
    """The benchmark model in every form, made when it is asked for."""

    folder: Path
    layers: int
    python: Path | None

    @cached_property
    def default(self) -> Path:
        """The default model, fetched and made if it is not there."""
        return ensure_default_model()

    def benchmark(self, threads: int) -> Subject:
        """The benchmark model for a daemon."""
        return Subject("benchmark model", self.coli(16), RAM, threads, 1.8, random=True)

    def trained(self, threads: int) -> Subject:
        """The default model for a daemon."""
        return Subject("default model", self.default, DEFAULT_RAM, threads, 3.0, random=False)

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
            command = [str(self.python), str(PEER), "quantize", str(source), str(part), PEER_FILES[bits]]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            part.replace(made)
        return made


@dataclass(frozen=True)
class Conditions:
    """How it is measured: a memory `limit` in MiB can be set in `group`; `texts` are for `default-disk`."""

    threads: int
    group: Path | None
    limit: int
    texts: Sequence[Path]


def measure(report: Report, parts: Sequence[str], models: Models, conditions: Conditions) -> None:
    """Run the parts, those of the same weights together. One that fails leaves the others' rows."""
    for kind in ("16", "-rounded16", "8", "4"):
        some = [part for part in parts if part in (f"prefill{kind}", f"decode{kind}")]
        if some:
            with _part(report, ", ".join(some)), ExitStack() as stack:
                resident(report, some, models, conditions.threads, stack)
    for part in parts:
        if part not in GOALS:
            with _part(report, part):
                _run(report, part, models, conditions)
    if any(_needs(part, "benchmark") for part in parts):
        report.notes.append(UNIFORM)


@contextmanager
def _part(report: Report, name: str) -> Iterator[None]:
    """Say what begins, and in the report what has failed."""
    _say(name)
    try:
        yield
    except ColiError as error:
        _say(f"{name}: {error}")
        report.failed[name] = str(error)


def _run(report: Report, part: str, models: Models, conditions: Conditions) -> None:
    threads = conditions.threads
    match part:
        case "overhead":
            overhead(report, "benchmark model", models.coli(16), "12G", threads)
            overhead(report, "default model", models.default, "2G", threads)
        case "disk":
            disk(report, models.coli(16), threads)
            if models.python is not None and conditions.group is not None:
                disk_against_peer(
                    report, models.coli(16), threads, models.python, models.peer(16), conditions.group,
                    conditions.limit,
                )  # fmt: skip
        case "default-disk":
            default_disk(report, models.default, threads, conditions.texts)
        case "daemon":
            subject = models.benchmark(threads)
            report.rows.append(start_row(subject))
            daemon_rows(report, subject)
        case "default-daemon":
            daemon_rows(report, models.trained(threads))
        case "pace":
            pace(report, models.benchmark(threads))
            pace(report, models.trained(threads))


def resident(report: Report, parts: Sequence[str], models: Models, threads: int, stack: ExitStack) -> None:
    """Prefill and decode with everything in memory, in turns with the peer; parts of the same weights.

    Raises ConfigurationError where activations cannot be rounded.
    """
    bits, rounded = _bits(parts[0]), "rounded" in parts[0]
    if rounded:
        check_bfloat16_dots()
    flags = ("--activations", "bfloat16") if rounded else ()
    ours = coli(models.coli(bits), threads, "--ram", "12G", *flags)
    stack.callback(ours.close)
    theirs = None if models.python is None else peer(models.python, models.peer(bits), threads)
    if theirs is not None:
        stack.callback(theirs.close)
        report.peer = str(theirs.started["version"])
    prompt = [(7 * i + 3) % VOCAB for i in range(PROMPT)]
    programs = [program for program in (ours, theirs) if program is not None]
    first = [program.ask(do="prefill", ids=prompt) for program in programs]  # and every expert is loaded
    if theirs is not None and bits == 16:
        name = "agreement of logits with the peer's (cosine)" + (", rounded" if rounded else "")
        report.rows.append(_same_logits(name, first[0]["logits"], first[1]["logits"]))
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
    report.measured[f"memory_read_{'rounded' * rounded}{bits}"] = limit
    for part in parts:
        tokens = PROMPT if part.startswith("prefill") else TOKENS
        rates = [[tokens / s for s in seconds[part, number]] for number in range(len(programs))]
        report.measured[part] = rates
        row = Row.against(f"{part}, tokens/s", rates[0], rates[1] if theirs else None, GOALS[part])
        report.rows.append(row)


def _same_logits(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Whether both programs compute the same function: the cosine of the angle between their logits."""
    dot = sum(a * b for a, b in zip(ours, theirs, strict=True))
    size = (sum(a * a for a in ours) * sum(b * b for b in theirs)) ** 0.5
    return Row(name, dot / size, 1.0, dot / size, 0.99)


def _machine() -> str:
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}"
