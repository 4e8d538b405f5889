"""Arms of a comparison: which of the two levers, cache-aware routing and prefetch, are pulled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coli_server.bench.decode import STOCK, Progress, WindowRun, decode_alone, decode_in_lockstep
from coli_server.bench.trace import lru_misses
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.engine.step import Span
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy

ARMS = {"stock": (False, False), "A": (True, False), "B": (False, True), "C": (True, True)}
"""Of each arm: CACHE_ROUTE, PILOT."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the model."""

    name: str
    policy: RoutePolicy
    pilot: bool

    def describe(self) -> str:
        """What is on, in one word: `stock`, `max-rank,J=2,M=12,shared,pilot`, ..."""
        return self.policy.describe() + (",pilot" if self.pilot else "")


def arms_of(words: str, policy: RoutePolicy) -> list[Arm]:
    """The arms that `words`, names with commas between them, ask for; `policy` is the lever's setting.

    Stock comes first, for it is what the others are compared with. Raises ConfigurationError.
    """
    names = [word for word in words.split(",") if word]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ConfigurationError(
            f"--arms is {words!r}: it must be some of {', '.join(ARMS)}, with commas between them"
        )
    if not policy.active:
        policy = replace(policy, mode="max-rank")
    chosen = [name for name in ARMS if name in names or name == "stock"]
    off = replace(STOCK, agree=True)
    return [Arm(name, policy if ARMS[name][0] else off, ARMS[name][1]) for name in chosen]


def run_arms(
    engine: Engine,
    windows: Sequence[Window],
    arms: Sequence[Arm],
    *,
    warm: bool = False,
    chunk: int = 1,
    progress: Progress | None = None,
) -> list[list[WindowRun]]:
    """Decode every window in every arm; the runs by arm and window.

    With a policy in session scope all of it runs in lockstep, each sequence on a logical cache, and nothing
    is timed. In shared scope the arms take turns on the real cache, window by window; before each turn it
    is empty, or with `warm` in the state that reading the first window leaves behind. `chunk` tokens share a
    step there: any number but 1 is for showing what it hides.
    """
    if any(arm.policy.active and arm.policy.scope == "session" for arm in arms):
        if chunk != 1:
            raise ConfigurationError("--chunk: in session scope every token is a step of its own")
        return decode_in_lockstep(engine, windows, [arm.policy for arm in arms], progress)[1]
    runs: list[list[WindowRun]] = [[] for _ in arms]
    pilot = engine.model.pilot
    try:
        for turn, (window, order) in enumerate(zip(windows, _orders(len(arms)), strict=False)):
            engine.model.pilot = False
            stock = engine.logits(window)
            for n in order:
                engine.model.pilot = arms[n].pilot
                engine.cache.clear()
                if warm:
                    _read(engine, windows[0])
                runs[n].append(decode_alone(engine, window, arms[n].policy, stock, chunk=chunk))
                if progress is not None:
                    progress(
                        turn * len(arms) + sum(len(each) > turn for each in runs), len(windows) * len(arms)
                    )
    finally:
        engine.model.pilot = pilot
    return runs


def logical_hits(run: WindowRun, policy: RoutePolicy, engine: Engine) -> tuple[int, int]:
    """Lookups of a run, and those that a logical cache of the policy's capacity would have missed."""
    capacity = policy.session_capacity(engine.k, engine.experts)
    return run.choices.size, lru_misses(run.choices, engine.experts, capacity)


def _orders(arms: int) -> Iterator[list[int]]:
    """The order of each turn: every arm is first, second, ... equally often."""
    turn = 0
    while True:
        yield [(turn + n) % arms for n in range(arms)]
        turn += 1


def _read(engine: Engine, window: Window) -> None:
    sequence = engine.new_sequence(STOCK, engine.new_kv(len(window)))
    engine.step([Span(sequence, window, True, len(window), "none")])
