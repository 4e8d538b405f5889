"""Coli's side of `coli bench speed`: an engine in a process of its own, told what to do line by line.

Every line of standard input is a JSON object, and so is each answer on standard output.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from coli_server.engine import Engine, kernels
from coli_server.engine.step import STOCK, Sequence, Span
from coli_server.engine.store import StoreOptions
from coli_server.routing import RoutePolicy

LOGITS = 1571
"""Every so many-th logit is compared with the peer's."""

READ_BYTES = 1 << 30


class Worker:
    """One engine and one sequence."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequence = self._fresh(STOCK)

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        match task["do"]:
            case "prefill":
                return self.prefill(tuple(task["ids"]))
            case "decode":
                return self.decode(task["ids"])
            case "policy":
                self.sequence = self._fresh(RoutePolicy(**task["policy"]))
                return {}
            case "memory":
                return {"rate": memory_rate()}
            case _:
                return {"rate": self.disk_rate()}

    def prefill(self, ids: tuple[int, ...]) -> dict[str, Any]:
        """Read a prompt into the emptied sequence."""
        self.sequence = self._fresh(self.sequence.policy)
        start = time.perf_counter()
        logits = self.engine.step([Span(self.sequence, ids, prompt=True, length=len(ids))])
        return {"seconds": time.perf_counter() - start, "logits": logits[0, ::LOGITS].tolist()}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """Tokens one by one behind what was read before; what their experts cost, and the time in kernels."""
        counters, step = self.engine.cache.counters, self.engine.step
        loads, nbytes = counters.loads, counters.load_bytes
        start = time.perf_counter()
        for token in ids:
            step([Span(self.sequence, (token,), prompt=False, length=self.sequence.position + 1)])
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "loads": counters.loads - loads,
            "bytes": counters.load_bytes - nbytes,
            "rss": _resident(),
        }

    def disk_rate(self) -> float:
        """Bytes a second of reading experts alone, through the cache's own buffers and read threads."""
        cache, rng = self.engine.cache, np.random.default_rng(0)
        before, start = cache.counters.load_bytes, time.perf_counter()
        while time.perf_counter() - start < 2.0:
            for layer in cache.layers:
                absent = np.flatnonzero(~cache.resident(layer))
                wanted = rng.permutation(absent)[: self.engine.k]
                with cache.stream(layer, wanted) as stream:
                    for _ in stream:
                        pass
        return (cache.counters.load_bytes - before) / (time.perf_counter() - start)

    def _fresh(self, policy: RoutePolicy) -> Sequence:
        return self.engine.new_sequence(policy, self.engine.new_kv(1024))


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


def _resident() -> int:
    """The most memory that the process has had in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coli_server.bench.speed_worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ram", required=True)
    parser.add_argument("--experts-per-layer", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--direct", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    engine = Engine.open(
        arguments.folder,
        ram=arguments.ram,
        experts_per_layer=arguments.experts_per_layer,
        threads=arguments.threads,
        context=1024,
        store=StoreOptions(direct=arguments.direct),
    )
    worker = Worker(engine)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
            }
        ),
        flush=True,
    )
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
