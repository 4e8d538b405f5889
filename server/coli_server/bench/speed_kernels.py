"""The time that compiled kernels take of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Self

from numba.core.dispatcher import Dispatcher

PACKAGES = ("coli_server.engine", "coli_server.routing")


class KernelClock:
    """While it is entered, adds up the calls of compiled functions and the seconds inside them.

    Every compiled function that Python code of the engine calls by a module's name is exchanged for one that
    looks at the clock. Functions that compiled code calls are inside already, and count once. Launching a
    kernel counts as the kernel's. The clock's own time, two looks a call, partly does not: what is found
    outside kernels is an upper bound. Everything must have been compiled before.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._replaced: list[tuple[ModuleType, str, Dispatcher]] = []

    def __enter__(self) -> Self:
        timed: dict[int, Callable[..., Any]] = {}
        for name, module in list(sys.modules.items()):
            if name.startswith(PACKAGES):
                for attribute, value in list(vars(module).items()):
                    if isinstance(value, Dispatcher):
                        self._replaced.append((module, attribute, value))
                        setattr(module, attribute, timed.setdefault(id(value), self._timed(value)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, attribute, value in self._replaced:
            setattr(module, attribute, value)
        self._replaced.clear()

    def _timed(self, kernel: Dispatcher) -> Callable[..., Any]:
        now = time.perf_counter

        def call(*arguments: Any) -> Any:
            start = now()
            result = kernel(*arguments)
            self.seconds += now() - start
            self.calls += 1
            return result

        return call
