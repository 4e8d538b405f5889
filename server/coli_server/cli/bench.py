"""`coli bench <what>`: measurements. One module of `coli_server.bench` each; nothing else is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from coli_server.errors import ConfigurationError

BENCHES: Mapping[str, str] = {
    "speed": "speed against llama.cpp and against what memory and disk allow",
    "quality": "speed and its price in quality: cache-aware routing and prefetch, on and off",
    "sweep": "misses saved and perplexity paid, over grids of the routing settings",
    "cache": "what eviction policies and cache sizes are worth, from a routing trace",
    "tasks": "multiple choice by log-likelihood",
    "lm_eval": "tasks of the package lm-eval on a running daemon",
    "free": "what the model writes by itself: loops, variety, length",
    "serve": "load on a running daemon: many clients, times as they see them",
    "soak": "the same for long, with clients that are killed: what stays behind?",
    "route": "what choosing experts costs, beside a decoded token",
}
DEFAULT = "quality"


def main(words: Sequence[str]) -> int:
    """Run one measurement; its own `--help` explains it."""
    name = words[0] if words else DEFAULT
    if name in ("-h", "--help"):
        print(f"usage: coli bench [<what>] [options]      without <what>: {DEFAULT}\n")
        for bench, help in BENCHES.items():
            print(f"  {bench:<8} {help}")
        print("\ncoli bench <what> --help explains one of them.")
        return 0
    if name.startswith("-"):
        return main([DEFAULT, *words])
    if name not in BENCHES:
        raise ConfigurationError(f"unknown measurement {name!r}; there are {', '.join(BENCHES)}")
    module = importlib.import_module(f"coli_server.bench.{name}")
    status = int(module.main(words[1:]))
    sys.stdout.flush()
    return status
