"""The engine thread: takes requests, batches their steps, and reports what happened."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.api import (
    SYSTEM,
    EngineSnapshot,
    Event,
    Failed,
    Finish,
    Finished,
    GenerationRequest,
    LayerUse,
    Progress,
    Started,
)
from coli_server.engine.engine import PREFILL_CHUNK, Engine
from coli_server.engine.generation import SHORT_PROMPT, Generation
from coli_server.engine.kv import KvCache
from coli_server.engine.pacing import ChunkPacer
from coli_server.engine.retained import KvStore
from coli_server.engine.scoring import LOGIT_ROWS, Scoring
from coli_server.engine.step import Span
from coli_server.errors import ColiError
from coli_server.telemetry.counters import Counters

log = logging.getLogger("coli.engine")

NICE = 19
"""Of the engine thread and its kernel threads: the event loop answers at once, at no cost in speed.

Linux lets a thread that wakes up take a core at once only if it has not had more than its share, and looks
again at the next tick, up to 4 ms later. The less the engine's share, the sooner the loop is owed something:
at nice 10 one answer in fifty waited so, at 19 one in 500. SCHED_IDLE is no better, and then one busy process
on each core, in the same session or container, stops the engine altogether; at 19 it runs at half the speed
that it has at 10.
"""

SHARED_CHUNK = PREFILL_CHUNK // 2
"""Most prompt tokens of a step that also decodes; running sequences wait for them (`engine.pacing`)."""


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    at: float


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class _Forget:
    session: str


@dataclass(frozen=True, slots=True)
class _Drop:
    session: str


class _Stop:
    pass


_Command = _Submit | _Cancel | _Forget | _Drop | _Stop


class EngineService:
    """Runs an `Engine` in a thread of its own. All methods may be called from any thread.

    `open_engine` is called on the new thread. `on_events` is called there too, once a step, with everything
    that happened. Every submitted request ends with exactly one `Finished` or `Failed`. Requests start in
    the order in which they came, as many together as `max_running` and the KV budget allow.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        on_events: Callable[[tuple[Event, ...]], None],
        *,
        max_running: int = 16,
    ) -> None:
        self._open_engine = open_engine
        self._on_events = on_events
        self._max_running = max_running
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="coli-engine", daemon=True)
        self._opened = threading.Event()
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._snapshot = EngineSnapshot()
        self._events: list[Event] = []
        self._waiting: deque[_Submit] = deque()
        self._running: dict[int, Generation | Scoring] = {}
        self._sessions: dict[str, Counters] = {SYSTEM: Counters()}
        self._closed = Counters()
        self._dropped: set[str] = set()
        self._changed: set[str] = {SYSTEM}
        self._layer_use = (0.0, LayerUse())
        self._pacer = ChunkPacer(SHARED_CHUNK)

    def start(self) -> Engine:
        """Start the thread, load the model and compile the kernels; returns the engine when it can serve.

        Raises what `open_engine` raised.
        """
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure
        assert self._engine is not None
        return self._engine

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Its prompt and options have been checked by the caller."""
        self._commands.put(_Submit(request, time.monotonic()))

    def cancel(self, key: int, finish: Finish = "cancelled") -> None:
        """End a request, waiting or running, within a step. Keys of ended requests are ignored."""
        self._commands.put(_Cancel(key, finish))

    def forget(self, session: str) -> None:
        """Forget the KV of a session."""
        self._commands.put(_Forget(session))

    def drop(self, session: str) -> None:
        """A session is closed: free its KV; its counters go into the closed ones when its requests ended."""
        self._commands.put(_Drop(session))

    def stop(self, timeout: float | None = None) -> bool:
        """Cancel what runs and end the thread. Returns whether it ended within `timeout` seconds."""
        self._commands.put(_Stop())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def snapshot(self) -> EngineSnapshot:
        """The picture after the latest step; never waits."""
        return self._snapshot

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _main(self) -> None:
        try:
            engine = self._open_engine()
            # The read threads exist by now and keep their priority; kernel threads inherit this one.
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            engine.warm()
            self._kv = KvStore(engine)
            self._engine = engine
            self._publish()
        except BaseException as error:
            self._failure = error
            self._opened.set()
            return
        self._opened.set()
        try:
            while self._turn(engine):
                pass
        finally:
            engine.close()

    def _turn(self, engine: Engine) -> bool:
        """Take commands, run one step, report. False when the service is to stop."""
        going = self._take_commands(engine, idle=not self._running and not self._waiting)
        self._expire()
        if going:
            self._admit(engine)
            if self._events:  # who has left the queue, or is over, hears of it before the step, not after it
                self._report()
            if self._running:
                self._step(engine)
        self._report()
        if engine.usage is not None:
            engine.usage.save_when_due()
        return going

    def _report(self) -> None:
        """Show the figures first: who reads them after an event must find it counted."""
        self._publish()
        events, self._events = tuple(self._events), []
        if events:
            self._on_events(events)

    def _take_commands(self, engine: Engine, *, idle: bool) -> bool:
        while True:
            try:
                # An idle engine wakes up once more, to save what it has learned.
                timeout = engine.usage.seconds_until_save() if idle and engine.usage is not None else None
                command = self._commands.get(idle, timeout)
            except Empty:
                return True
            idle = False
            match command:
                case _Submit():
                    self._sessions.setdefault(command.request.session, Counters())
                    self._changed.add(command.request.session)
                    self._waiting.append(command)
                case _Cancel(key, finish):
                    self._end(key, finish)
                case _Forget(session):
                    self._kv.forget(session)
                case _Drop(session):
                    self._kv.forget(session)
                    self._dropped.add(session)
                    self._fold(session)
                case _Stop():
                    for key in [*self._running, *(waiting.request.key for waiting in self._waiting)]:
                        self._end(key, "drained")
                    return False

    def _expire(self) -> None:
        now = time.monotonic()
        requests = [generation.request for generation in self._running.values()]
        requests += [waiting.request for waiting in self._waiting]
        for request in requests:
            if request.deadline is not None and request.deadline <= now:
                self._end(request.key, "deadline")

    def _admit(self, engine: Engine) -> None:
        """Start waiting requests in order, as long as there is room for the next one."""
        while self._waiting and len(self._running) < self._max_running:
            submitted = self._waiting[0]
            request = submitted.request
            try:
                kv = self._kv.take(request)
                if kv is None:
                    return
                generation = self._begin(engine, submitted, kv)
            except Exception as error:
                self._waiting.popleft()
                self._events.append(_failed(request, error, Counters()))
                self._fold(request.session)
                continue
            self._waiting.popleft()
            self._running[request.key] = generation
            self._events.append(Started(request.key))

    def _begin(self, engine: Engine, submitted: _Submit, kv: KvCache) -> Generation | Scoring:
        """The state of a request that starts now, with a cache of its own."""
        request = submitted.request
        try:
            sequence = engine.new_sequence(request.policy, kv)
            generation: Generation | Scoring
            if request.kind == "score":
                generation = Scoring(request, sequence)
            else:
                generation = Generation(request, sequence, engine.text, engine.end_ids)
                generation.since(submitted.at)
        except Exception:
            self._kv.give_back(request, kv, retain=False)
            raise
        sequence.counters.prompt_tokens_total += len(request.prompt)
        return generation

    def _step(self, engine: Engine) -> None:
        """One step of everything that decodes, and of one request whose prompt is not read yet, in turns.

        Texts to be scored are many and short: as many as fill the step are read together.
        """
        decoding = [generation for generation in self._running.values() if not generation.in_prompt]
        reading = [generation for generation in self._running.values() if generation.in_prompt]
        batch = [(generation, generation.next_span(1)) for generation in decoding]
        room, wanted = self._room(len(decoding), reading), 0
        for generation in reading if room else ():
            span = generation.next_span(min(engine.prompt_chunk(generation.request.policy), room))
            batch.append((generation, span))
            room -= len(span.ids)
            wanted += span.wanted
            # Who has read goes behind the others: a long prompt does not hold up the short ones.
            self._running[generation.request.key] = self._running.pop(generation.request.key)
            if room <= 0 or wanted >= LOGIT_ROWS or generation.request.kind != "score":
                break
        try:
            self._advance(engine, batch)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0][0], error)
                return
            # A step is all or nothing, so each sequence can be tried alone: only the guilty ones fail.
            for single in batch:
                try:
                    self._advance(engine, [single])
                except Exception as own:
                    self._fail(single[0], own)

    def _room(self, decoding: int, reading: Sequence[Generation | Scoring]) -> int:
        """Prompt tokens that the next step may take, `reading[0]` first; 0 where it shall decode only."""
        if not decoding:
            return PREFILL_CHUNK
        if not reading:
            return 0
        first = reading[0]
        return SHORT_PROMPT if isinstance(first, Generation) and first.short else self._pacer.chunk(decoding)

    def _advance(self, engine: Engine, batch: list[tuple[Generation | Scoring, Span]]) -> None:
        start = time.monotonic()
        logits = engine.step([span for _, span in batch])
        now = time.monotonic()
        decoding = sum(not span.prompt for _, span in batch)
        if decoding:
            tokens = sum(len(span.ids) for _, span in batch if span.prompt)
            self._pacer.observe(decoding, tokens, now - start)
        row = 0
        for generation, span in batch:
            if span.prompt:
                prompt = generation.request.prompt
                self._events.append(Progress(generation.request.key, generation.prefilled, len(prompt)))
            if span.want == "none":
                continue
            try:
                self._accept(generation, logits[row : row + span.wanted], now)
            except Exception as error:
                self._fail(generation, error)
            row += span.wanted

    def _accept(self, generation: Generation | Scoring, logits: NDArray[np.float32], now: float) -> None:
        chunk, finish = generation.accept(logits, now)
        if chunk is not None:
            self._events.append(chunk)
        if finish is not None:
            self._close(generation, generation.finished(finish))

    def _end(self, key: int, finish: Finish) -> None:
        """End a request that waits or runs, between two steps."""
        generation = self._running.get(key)
        if generation is not None:
            try:
                chunk, finished = generation.end(finish)
            except Exception as error:
                self._fail(generation, error)
                return
            if chunk is not None:
                self._events.append(chunk)
            self._close(generation, finished)
            return
        for waiting in self._waiting:
            if waiting.request.key == key:
                self._waiting.remove(waiting)
                prompt = len(waiting.request.prompt)
                self._events.append(Finished(key, finish, Counters(), 0, prompt, None, 0.0))
                self._fold(waiting.request.session)
                return

    def _fail(self, generation: Generation | Scoring, error: Exception) -> None:
        self._close(generation, _failed(generation.request, error, generation.sequence.counters.copy()))

    def _close(self, generation: Generation | Scoring, event: Finished | Failed) -> None:
        request = generation.request
        del self._running[request.key]
        retain = isinstance(event, Finished) and request.session not in self._dropped
        self._kv.give_back(request, generation.sequence.kv, retain=retain)
        self._sessions[request.session].add(generation.sequence.counters)
        self._changed.add(request.session)
        self._events.append(event)
        self._fold(request.session)

    def _fold(self, session: str) -> None:
        """Move a dropped session's counters to the closed ones once nothing of it is left."""
        if session not in self._dropped:
            return
        busy = [generation.request.session for generation in self._running.values()]
        busy += [waiting.request.session for waiting in self._waiting]
        if session not in busy:
            self._dropped.discard(session)
            counters = self._sessions.pop(session, None)
            self._changed.add(session)
            if counters is not None:
                self._closed.add(counters)

    def _publish(self) -> None:
        engine = self._engine
        if engine is None:
            return
        cache = engine.cache
        cache.poll()
        system = self._sessions[SYSTEM]
        if system.loads < cache.counters.system_loads:
            system.loads = cache.counters.system_loads
            system.load_bytes = cache.counters.system_load_bytes
            self._changed.add(SYSTEM)
        self._snapshot = EngineSnapshot(
            sessions=self._session_counters(),
            closed=self._closed.copy(),
            load_errors=cache.counters.load_errors,
            load_seconds=cache.counters.load_seconds,
            wait_seconds=cache.counters.wait_seconds,
            evictions=cache.counters.evictions,
            slots_per_layer=cache.slots_per_layer,
            cache_bytes=cache.bytes,
            cache_capacity_bytes=cache.capacity_bytes,
            pinned_experts=cache.pinned,
            prefetch_issued=cache.counters.prefetch_issued,
            prefetch_used=cache.counters.prefetch_used,
            prefetch_late=cache.counters.prefetch_late,
            prefetch_wasted=cache.counters.prefetch_wasted,
            prefetch_failed=cache.counters.prefetch_failed,
            prefetch_in_flight=cache.prefetch_in_flight,
            kv_bytes=self._kv.nbytes,
            kv_capacity_bytes=engine.memory.kv_bytes,
            kv_evictions=self._kv.evictions,
            layer_use=self._read_layer_use(engine),
            experts=engine.spec.moe.experts,
            layers_resident=cache.residents,
            expert_load=engine.expert_load.snapshot(),
            expert_wait=engine.expert_wait.snapshot(),
            heartbeat=time.monotonic(),
        )

    def _session_counters(self) -> dict[str, Counters]:
        """Counters by session, those of running requests included. Only what changed is copied."""
        running: dict[str, list[Counters]] = {}
        for generation in self._running.values():
            running.setdefault(generation.request.session, []).append(generation.sequence.counters)
        published = dict(self._snapshot.sessions)
        for session in self._changed | running.keys():
            counters = self._sessions.get(session)
            if counters is None:
                published.pop(session, None)
                continue
            published[session] = total = counters.copy()
            for own in running.get(session, ()):
                total.add(own)
        self._changed = set(running)
        return published

    def _read_layer_use(self, engine: Engine) -> LayerUse:
        """Read when work ends and at most four times a second before: it costs more than a counter."""
        now = time.monotonic()
        if not self._running or now - self._layer_use[0] >= 0.25:
            self._layer_use = (now, engine.model.use.read())
        return self._layer_use[1]


def _failed(request: GenerationRequest, error: Exception, counters: Counters) -> Failed:
    """The last event of a request that failed; only errors raised on purpose tell the client why."""
    if isinstance(error, ColiError):
        code = error.code if error.code in ("MODEL", "INTERNAL") else "INTERNAL"
        message = str(error)
        log.warning("request %d failed: %s", request.key, message)
    else:
        code, message = "INTERNAL", "an error inside the engine; the log has the details"
        log.error("request %d failed", request.key, exc_info=error)
    return Failed(request.key, code, message, counters)
