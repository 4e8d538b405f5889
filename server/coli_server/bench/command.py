"""What the measurements' command lines have in common: the text, the engine, progress."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from coli_server.bench.windows import Window, read_texts, windows_of
from coli_server.engine import Engine
from coli_server.engine.model import Checkpoint
from coli_server.errors import ConfigurationError
from coli_server.models import ensure_default_model
from coli_server.settings import Settings

ENGINE_SETTINGS = ("model", "ram", "experts_per_layer", "threads", "activations")


def add_text_arguments(parser: argparse.ArgumentParser, *, windows: int, window: int) -> None:
    """Flags for what is measured on."""
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="texts to measure on (default: those that the default model's makers kept for it)",
    )
    parser.add_argument("--windows", type=positive, default=windows, metavar="N", help=f"windows ({windows})")
    parser.add_argument(
        "--window", type=positive, default=window, metavar="N", help=f"tokens of a window ({window})"
    )


def positive(word: str) -> int:
    """A whole number above 0, for argparse."""
    if not word.isascii() or not word.isdigit() or not 0 < int(word) < 2**31:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def text_windows(engine: Engine, arguments: argparse.Namespace) -> list[Window]:
    """The windows that the flags of `add_text_arguments` ask for."""
    if not 2 <= arguments.window <= engine.context_length:
        raise ConfigurationError(
            f"--window={arguments.window}: must be from 2 to {engine.context_length} tokens"
        )
    return windows_of(engine.text, read_texts(arguments.text), arguments.windows, arguments.window)


def open_engine(settings: Settings, *, all_resident: bool = False) -> Engine:
    """The engine of these settings, with stock routing of its own.

    Without `experts_per_layer` it holds half of the experts; with `all_resident` as many as the memory.
    """
    folder = Path(settings.model) if settings.model else ensure_default_model()
    slots = settings.experts_per_layer
    if slots is None and not all_resident:
        moe = Checkpoint.open(folder).spec.moe
        slots = max(moe.k, moe.experts // 2)
    return Engine.open(
        folder,
        ram=settings.ram,
        experts_per_layer=slots,
        threads=settings.threads or None,
        activations=settings.activations,
    )


def show_progress(done: int, total: int) -> None:
    """One line on a terminal's standard error, written over."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} windows", end=end, file=sys.stderr, flush=True)
