"""The read threads: they fill memory with experts and report back, and do nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from coli_server.experts.layout import Bytes, ExpertLayout, FileRead, Part
from coli_server.experts.reader import Reader, read_fully


@dataclass(slots=True, eq=False)
class ReadJob:
    """One expert to be read into one slot; reported in the pool's `done` when it is over, come what may.

    `error` and `seconds` (of reading and transforming) are valid once the job is done; `read` says that the
    slot has been filled. Until a job is done or withdrawn, its slot's bytes belong to the read threads.
    """

    layer: int
    expert: int
    memory: Bytes
    slot: int
    layout: ExpertLayout
    reads: Sequence[FileRead]
    read: bool = False
    error: Exception | None = None
    seconds: float = 0.0


class ReadPool:
    """One thread for each of `staging`, its own scratch memory. Urgent jobs go before all others.

    Jobs of the same urgency run in the order of `submit`. Jobs that are not urgent leave one thread free,
    if there are two, so that an urgent one never waits for a whole read that nobody asked for.

    The threads start at once: they inherit the niceness of the thread that builds the pool, and they must
    run at normal priority even when the engine thread does not.
    """

    def __init__(self, reader: Reader, staging: Sequence[NDArray[np.uint8]]) -> None:
        self.done: SimpleQueue[ReadJob] = SimpleQueue()
        self._reader = reader
        self._urgent: deque[ReadJob] = deque()
        self._patient: deque[ReadJob] = deque()
        self._patient_running = 0
        self._patient_threads = max(1, len(staging) - 1)
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(memory,), name=f"expert-read-{index}", daemon=True)
            for index, memory in enumerate(staging)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ReadJob, *, urgent: bool = True) -> None:
        with self._changed:
            (self._urgent if urgent else self._patient).append(job)
            self._changed.notify()

    def hasten(self, job: ReadJob) -> bool:
        """Make a job urgent. False when a thread has begun it: nothing can speed it up then."""
        with self._changed:
            if job not in self._patient:
                return False
            self._patient.remove(job)
            self._urgent.append(job)
            self._changed.notify()
            return True

    def withdraw(self, job: ReadJob) -> bool:
        """Take back a job that no thread has begun: it is never reported. False for any other."""
        with self._changed:
            for jobs in (self._urgent, self._patient):
                if job in jobs:
                    jobs.remove(job)
                    return True
            return False

    def close(self) -> None:
        """End the threads, after the jobs submitted so far, and close the reader."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._reader.close()

    def _work(self, staging: NDArray[np.uint8]) -> None:
        while (taken := self._take()) is not None:
            job, urgent = taken
            start = time.perf_counter()
            try:
                _run(job, self._reader, staging)
                job.read = True
            except Exception as error:  # of any kind: a job that is not reported would stop the engine
                job.error = error
            job.seconds = time.perf_counter() - start
            if not urgent:
                with self._changed:
                    self._patient_running -= 1
                    self._changed.notify()
            self.done.put(job)

    def _take(self) -> tuple[ReadJob, bool] | None:
        """The next job and whether it is urgent; waits for one. None when the pool is closing."""
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft(), True
                if self._patient and self._patient_running < self._patient_threads:
                    self._patient_running += 1
                    return self._patient.popleft(), False
                if self._closing and not self._patient:
                    return None
                self._changed.wait()


def _run(job: ReadJob, reader: Reader, staging: NDArray[np.uint8]) -> None:
    slot = job.memory.data
    stage = staging.data
    for read in job.reads:
        buffers = [
            (stage if segment.staged else slot)[segment.offset : segment.offset + segment.nbytes]
            for segment in read.segments
        ]
        read_fully(reader, read.file, buffers, read.offset)
    if job.layout.transform is not None:
        job.layout.transform(_views(job.layout.staged, staging), _views(job.layout.parts, job.memory))


def _views(parts: Mapping[str, Part], memory: Bytes) -> dict[str, Bytes]:
    return {name: memory[part.offset : part.offset + part.nbytes] for name, part in parts.items()}
