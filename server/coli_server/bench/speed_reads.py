"""How fast the disk gives experts, and whether what was read came from it.

    python -m coli_server.bench.speed_reads FOLDER

measures for a second with each line of standard input, and answers with a JSON object on standard output.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coli_server.engine.model import Checkpoint
from coli_server.engine.store import StoreOptions, make_reader
from coli_server.errors import ModelError
from coli_server.experts import LayerExperts
from coli_server.experts.layout import plan_reads
from coli_server.experts.reader import read_fully
from coli_server.experts.slab import Arena


class DiskMeter:
    """Reads random experts and does nothing else: by the product's own reader, into memory like its slots,
    as many at a time as it reads.

    No jobs are handed from thread to thread and no layer waits for another, so this is what the disk can do,
    not what the cache makes of it.
    """

    def __init__(self, layers: Sequence[LayerExperts], store: StoreOptions, seed: int = 0) -> None:
        self._layers = layers
        slot = max(layer.layout.slot_bytes + layer.layout.staging_bytes for layer in layers)
        arena = Arena([slot] * store.readers)
        self._slots = [arena.piece(index, slot) for index in range(store.readers)]
        for memory in self._slots:
            memory[:] = 0  # the first touch of memory is slow
        self._reader = make_reader(store, layers)
        self._random = [np.random.default_rng([seed, thread]) for thread in range(store.readers)]

    def rate(self, seconds: float) -> tuple[float, int]:
        """Bytes a second of `seconds`, and the bytes. Every call reads other experts."""
        read = [0] * len(self._slots)
        start = time.perf_counter()
        threads = [
            threading.Thread(target=self._work, args=(index, start + seconds, read))
            for index in range(len(read))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(read) / (time.perf_counter() - start), sum(read)

    def close(self) -> None:
        self._reader.close()

    def _work(self, index: int, end: float, read: list[int]) -> None:
        random, slot = self._random[index], self._slots[index].data
        while time.perf_counter() < end:
            layer = self._layers[int(random.integers(len(self._layers)))]
            source = layer.sources[int(random.integers(layer.experts))]
            for each in plan_reads(layer.layout, source):
                buffers = [
                    slot[at : at + part.nbytes]
                    for part in each.segments
                    for at in [part.offset + (layer.layout.slot_bytes if part.staged else 0)]
                ]
                read_fully(self._reader, each.file, buffers, each.offset)
            read[index] += layer.expert_bytes()


def storage_bytes() -> int | None:
    """Bytes that this process has had read from disks so far; None where the system does not tell.

    What comes from the page cache is not among them.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def resident_bytes(figure: str, process: int | str = "self") -> int:
    """VmRSS, what a process has in RAM, or VmHWM, the most that it has had there.

    Raises ModelError where the system does not tell.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{figure}:"):
            return int(line.split()[1]) << 10
    raise ModelError(f"the system does not tell {figure}")


def main() -> None:
    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    meter = DiskMeter([experts.files for experts in checkpoint.experts], StoreOptions(direct=True))
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        before = storage_bytes()
        rate, nbytes = meter.rate(1.0)
        after = storage_bytes()
        stored = None if before is None or after is None else after - before
        print(json.dumps({"rate": rate, "bytes": nbytes, "stored": stored}), flush=True)
    meter.close()


if __name__ == "__main__":
    main()
