"""Teacher-forced decoding: a known text fed one token at a time, as if it were being generated.

Only so does cache-aware routing see what it sees in use. A text scored in wide batches meets a cache that
hardly moves: next to nothing is swapped, and a harmful setting looks harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coli_server.bench.scores import F32, StockRows, TokenScores, compare
from coli_server.bench.trace import Choices, ChoiceTrace, tracing
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.engine.figures import Counters
from coli_server.engine.step import Sequence as Running
from coli_server.engine.step import Span
from coli_server.routing import RoutePolicy

STOCK = RoutePolicy(mode="off")
BLOCK = 16
"""Positions whose stock distributions are held at once: rows as wide as the vocabulary, in float64."""

MAX_ROWS = 40
"""Sequences that run in lockstep."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WindowRun:
    """One window decoded under one policy, all its tokens but the last.

    `choices` are the experts that ran. `seconds` and `load_bytes` (everything read from disk meanwhile,
    prefetches too) are those of decoding alone, and None where windows ran in lockstep.
    """

    scores: TokenScores
    counters: Counters
    choices: Choices
    seconds: float | None = None
    load_bytes: int | None = None


def decode_in_lockstep(
    engine: Engine,
    windows: Sequence[Window],
    policies: Sequence[RoutePolicy],
    progress: Progress | None = None,
) -> tuple[list[Choices], list[list[WindowRun]]]:
    """Decode all windows, of one length, under all policies; many of them share each step.

    Every sequence has a logical cache of its own, so the figures are those of decoding it alone. Returns
    the stock router's choices by window, and the runs by policy and window.
    Raises ValueError for a policy in shared scope: its sequences would see each other's experts.
    """
    if any(policy.active and policy.scope != "session" for policy in policies):
        raise ValueError("sequences in lockstep need a logical cache each: scope=session")
    stock: list[Choices] = []
    runs: list[list[WindowRun]] = [[] for _ in policies]
    share, lanes = _batch(engine, len(windows[0]), len(policies))
    done, total = 0, len(windows) * len(policies)
    with tracing(engine) as trace:
        for first in range(0, len(windows), share):
            part = windows[first : first + share]
            for low in range(0, max(1, len(policies)), lanes):
                some = policies[low : low + lanes]
                choices, found = _lockstep(engine, part, some, trace)
                stock += choices if low == 0 else []
                for n, by_window in enumerate(found):
                    runs[low + n] += by_window
                done += len(part) * len(some)
                if progress is not None:
                    progress(done, total)
    return stock, runs


def _batch(engine: Engine, length: int, policies: int) -> tuple[int, int]:
    """How many windows, and policies of each, run together: as many as the memory for KV has room for.

    Each window also takes one sequence that reads it under stock routing.
    """
    room = engine.memory.kv_bytes // (engine.memory.kv_token_bytes * length)
    rows = max(2, min(MAX_ROWS, room))
    lanes = max(1, min(policies, rows - 1))
    return max(1, rows // (lanes + 1)), lanes


def _lockstep(
    engine: Engine, windows: Sequence[Window], policies: Sequence[RoutePolicy], trace: ChoiceTrace
) -> tuple[list[Choices], list[list[WindowRun]]]:
    length = len(windows[0])
    references = [_sequence(engine, STOCK, length) for _ in windows]
    stock = [trace.follow(reference, length - 1) for reference in references]
    lanes = [(n, _sequence(engine, policy, length)) for policy in policies for n in range(len(windows))]
    choices = [trace.follow(sequence, length - 1) for _, sequence in lanes]
    parts: list[list[TokenScores]] = [[] for _ in lanes]
    for start in range(0, length - 1, BLOCK):
        stop = min(start + BLOCK, length - 1)
        read = [
            Span(reference, window[start:stop], True, length, "all")
            for reference, window in zip(references, windows, strict=True)
        ]
        block = StockRows.of(engine.step(read))
        for t in range(start, stop) if lanes else ():
            logits = engine.step([Span(sequence, (windows[n][t],), False, length) for n, sequence in lanes])
            for lane, (n, _) in enumerate(lanes):
                row = n * (stop - start) + t - start
                target = np.array([windows[n][t + 1]])
                parts[lane].append(compare(block[row : row + 1], logits[lane : lane + 1], target))
    found = [
        WindowRun(TokenScores.join(scores), sequence.counters, chosen)
        for scores, (_, sequence), chosen in zip(parts, lanes, choices, strict=True)
    ]
    count = len(windows)
    return stock, [found[at : at + count] for at in range(0, len(found), count)]


def decode_alone(
    engine: Engine, window: Window, policy: RoutePolicy, stock: F32, *, chunk: int = 1
) -> WindowRun:
    """Decode one window under `policy` on the cache as it is; `stock` are its logits under stock routing.

    The clock runs inside the engine's steps only. More than one token a step, `chunk`, is no decoding any
    more: it shows what a measurement in wide batches would have said.
    """
    length, seconds, parts = len(window), 0.0, []
    before = engine.cache.counters.load_bytes
    sequence = _sequence(engine, policy, length)
    with tracing(engine) as trace:
        choices = trace.follow(sequence, length - 1)
        for t in range(0, length - 1, chunk):
            end = min(t + chunk, length - 1)
            span = Span(sequence, window[t:end], False, length, "all")
            start = time.perf_counter()
            logits = engine.step([span])
            seconds += time.perf_counter() - start
            parts.append(compare(StockRows.of(stock[t:end]), logits, np.array(window[t + 1 : end + 1])))
    read = engine.cache.counters.load_bytes - before
    return WindowRun(TokenScores.join(parts), sequence.counters, choices, seconds, read)


def in_session_scope(policy: RoutePolicy, capacity: int) -> RoutePolicy:
    """`policy` with a logical cache of `capacity` experts a layer of its own."""
    return replace(policy, scope="session", capacity=capacity)


def _sequence(engine: Engine, policy: RoutePolicy, length: int) -> Running:
    return engine.new_sequence(policy, engine.new_kv(length))
