"""Coli's side of `coli bench speed`: an engine in a process of its own, told what to do line by line.

Every line of standard input is a JSON object, and so is each answer on standard output.
"""

from __future__ import annotations

import argparse
import bisect
import json
import mmap
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from coli_server.bench.arms import Arm, arms_of, run_arms
from coli_server.bench.decode import WindowRun
from coli_server.bench.served import served
from coli_server.bench.speed_kernels import KernelClock
from coli_server.bench.speed_reads import resident_bytes, storage_bytes
from coli_server.bench.summary import quality
from coli_server.engine import Engine, kernels
from coli_server.engine.api import SamplingOptions
from coli_server.engine.engine import PREFILL_CHUNK
from coli_server.engine.memory import plan_memory
from coli_server.engine.model import Checkpoint
from coli_server.engine.step import STOCK, Sequence, Span
from coli_server.engine.store import StoreOptions
from coli_server.engine.text import Text
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy

LOGITS = 1571
"""Every so many-th logit is compared with the peer's."""

READ_BYTES = 1 << 30
MOST_MEBIBYTES = 1 << 20
SLACK_MEBIBYTES = 4
"""By how much two processes differ that have done the same."""


class Worker:
    """One engine and one sequence. Its public methods are the tasks; `answer` calls them by name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequence = self._fresh(STOCK)
        self.open = True
        stock, default = arms_of("stock,A", STOCK)
        widest = replace(default.policy, m=self.engine.model.spec.moe.experts)
        self._arms = [stock, default, Arm("widest", widest, pilot=False)]
        self._runs: dict[str, list[WindowRun]] = {}

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        """Do the task `task["do"]` with the other items as arguments."""
        arguments = {name: value for name, value in task.items() if name != "do"}
        method: Callable[..., dict[str, Any]] = getattr(self, task["do"])
        return method(**arguments)

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Read a prompt into the emptied sequence."""
        self.sequence = self._fresh(self.sequence.policy)
        start = time.perf_counter()
        logits = self.engine.step([Span(self.sequence, tuple(ids), prompt=True, length=len(ids))])
        return {"seconds": time.perf_counter() - start, "logits": logits[0, ::LOGITS].tolist()}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """Tokens one by one behind what was read before, and what their experts cost.

        `stored` of the `bytes` that were read came from the disk.
        """
        counters, stored = self.engine.cache.counters, storage_bytes()
        loads, nbytes = counters.loads, counters.load_bytes
        seconds = self._decode(ids)
        return {
            "seconds": seconds,
            "loads": counters.loads - loads,
            "bytes": counters.load_bytes - nbytes,
            "stored": _since(stored),
            "rss": resident_bytes("VmHWM"),
        }

    def clocked(self, ids: list[int]) -> dict[str, Any]:
        """The same, and the time inside kernels: `kernels` seconds in `calls` calls."""
        loads = self.engine.cache.counters.loads
        with KernelClock() as clock:
            seconds = self._decode(ids)
        loads = self.engine.cache.counters.loads - loads
        return {"seconds": seconds, "kernels": clock.seconds, "calls": clock.calls, "loads": loads}

    def serve(self, prompts: list[int], tokens: int) -> dict[str, Any]:
        """Answers of the service, each behind a prompt of one token, drawn and made text of; ends the engine.

        `seconds` of each are those of its tokens behind the first, and `kernels` their share.
        """
        answers = []
        self.open = False
        with served(self.engine, 1) as service:
            for prompt in prompts:
                with KernelClock() as clock:
                    (answer,) = service.generate([[prompt]], tokens, STOCK, [SamplingOptions()])
                made = answer.end.tokens
                kernels = clock.seconds * (made - 1) / made
                answers.append({"seconds": answer.end.decode_seconds, "kernels": kernels, "tokens": made})
        return {"answers": answers}

    def policy(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """Route as it says from the next prompt on."""
        self.sequence = self._fresh(RoutePolicy(**policy))
        return {}

    def load(self) -> dict[str, Any]:
        """Load every expert that has room."""
        cache = self.engine.cache
        for layer in cache.layers:
            with cache.stream(layer, range(cache.slots_per_layer)) as stream:
                for _ in stream:
                    pass
        return {"complete": all(cache.complete(layer) for layer in cache.layers)}

    def memory(self) -> dict[str, Any]:
        """Bytes a second of reading memory."""
        return {"rate": memory_rate()}

    def arms(self, window: list[int], turn: int) -> dict[str, Any]:
        """Decode a window in each arm, beginning with another one every turn.

        The arms: stock routing, CACHE_ROUTE=1 as it is by default (`A`), and with a window of all experts
        (`widest`). The tokens, seconds and bytes of each by its name; `bytes` read by all of them, and how
        many are `stored` on the disk. Between arms the cache is emptied.
        """
        first = turn % len(self._arms)
        arms = self._arms[first:] + self._arms[:first]
        counters, stored = self.engine.cache.counters, storage_bytes()
        before = counters.load_bytes
        runs = run_arms(self.engine, [tuple(window)], arms)
        nbytes, stored = counters.load_bytes - before, _since(stored)
        answer: dict[str, Any] = {"bytes": nbytes, "stored": stored, "rss": resident_bytes("VmHWM")}
        for arm, (run,) in zip(arms, runs, strict=True):
            self._runs.setdefault(arm.name, []).append(run)
            tokens = len(run.scores.nll)
            answer[arm.name] = {"tokens": tokens, "seconds": run.seconds, "bytes": run.load_bytes}
        return answer

    def price(self) -> dict[str, Any]:
        """What routing cost in quality, over all windows so far: figures of `summary.Quality` by arm."""
        return {name: asdict(quality(runs)) for name, runs in self._runs.items()}

    def _decode(self, ids: list[int]) -> float:
        step = self.engine.step
        start = time.perf_counter()
        for token in ids:
            step([Span(self.sequence, (token,), prompt=False, length=self.sequence.position + 1)])
        return time.perf_counter() - start

    def _fresh(self, policy: RoutePolicy) -> Sequence:
        return self.engine.new_sequence(policy, self.engine.new_kv(self.engine.context_length))


def _since(before: int | None) -> int | None:
    """Bytes read from disks since there were `before` of them."""
    now = storage_bytes()
    return None if now is None or before is None else now - before


def least_ram(folder: Path, slots: int, context: int, store: StoreOptions) -> int:
    """The least budget, in bytes, that has room for `slots` experts of every layer."""
    text = Text.load(folder)  # a process that serves has it when it plans its memory
    checkpoint = Checkpoint.open(folder)

    def enough(mebibytes: int) -> bool:
        try:
            plan = plan_memory(checkpoint, mebibytes << 20, slots, context, PREFILL_CHUNK, store=store)
        except ConfigurationError:
            return False
        return plan.slots_per_layer >= slots

    least = bisect.bisect_left(range(MOST_MEBIBYTES), True, key=enough)
    del text
    return least + SLACK_MEBIBYTES << 20


def memory_rate() -> float:
    """Bytes a second of reading memory as expert slots lie in it, by the very kernel of a decoded token."""
    region = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    weights = np.frombuffer(region, np.float32).reshape(-1, 2048)
    weights[:] = 1
    x = np.ones((1, 2048), np.float32)
    out = np.empty((1, len(weights)), np.float32)
    best = min(_seconds_of(x, weights, out) for _ in range(5))
    return READ_BYTES / best


def _seconds_of(x: Any, weights: Any, out: Any) -> float:
    start = time.perf_counter()
    kernels.linear(x, weights, kernels.Kind.F32, None, out)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coli_server.bench.speed_worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ram", help="without it: say how little is enough, and end")
    parser.add_argument("--experts-per-layer", type=int)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--activations", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    store = StoreOptions(direct=arguments.direct)
    if arguments.ram is None:
        kernels.setup(arguments.threads)
        least = least_ram(arguments.folder, arguments.experts_per_layer, arguments.context, store)
        print(json.dumps({"least": least}), flush=True)
        return
    start = time.perf_counter()
    engine = Engine.open(
        arguments.folder,
        ram=arguments.ram,
        experts_per_layer=arguments.experts_per_layer,
        threads=arguments.threads,
        context=arguments.context,
        activations=arguments.activations,
        store=store,
    )
    worker = Worker(engine)
    started = {
        "seconds": time.perf_counter() - start,
        "ram": engine.memory.ram,
        "slots": engine.cache.slots_per_layer,
        "experts": engine.experts,
    }
    print(json.dumps(started), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)
    if worker.open:
        engine.close()


if __name__ == "__main__":
    main()
