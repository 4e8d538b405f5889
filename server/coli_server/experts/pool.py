"""The read threads: they fill memory with experts and report back, and do nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from coli_server.experts.layout import Bytes, ExpertLayout, FileRead, Part
from coli_server.experts.reader import Reader, read_fully


@dataclass(slots=True, eq=False)
class ReadJob:
    """One expert to be read into one slot; put into `done` when it is over, whatever happened.

    `cancelled` may be set by the owner until then: a job that no thread has begun is then not read.
    `error` and `seconds` (of reading and transforming) are valid once the job is done; `read` says that the
    slot has been filled. Until a job is done, its slot's bytes belong to the read threads.
    """

    expert: int
    memory: Bytes
    slot: int
    layout: ExpertLayout
    reads: Sequence[FileRead]
    done: SimpleQueue[ReadJob]
    cancelled: bool = False
    read: bool = False
    error: Exception | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class ReadPool:
    """`threads` threads that run jobs in the order of `submit`, each with `staging` bytes of its own.

    The threads start at once: they inherit the niceness of the thread that builds the pool, and they must
    run at normal priority even when the engine thread does not.
    """

    reader: Reader
    staging: Sequence[NDArray[np.uint8]]
    _jobs: SimpleQueue[ReadJob | None] = field(default_factory=SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, staging in enumerate(self.staging):
            thread = threading.Thread(
                target=self._work, args=(staging,), name=f"expert-read-{index}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def submit(self, job: ReadJob) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads, after the jobs submitted so far, and close the reader."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.reader.close()

    def _work(self, staging: NDArray[np.uint8]) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.cancelled:
                start = time.perf_counter()
                try:
                    _run(job, self.reader, staging)
                    job.read = True
                except Exception as error:  # of any kind: a job that is not reported would stop the engine
                    job.error = error
                job.seconds = time.perf_counter() - start
            job.done.put(job)


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
