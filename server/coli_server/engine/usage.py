"""The usage history of a running engine: which model it is about, where it is kept, when it is saved."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.moe import MoeBlock
from coli_server.engine.spec import ModelSpec
from coli_server.engine.step import RowGroup
from coli_server.experts import ExpertCache, ExpertReadError, HistoryError, UsageHistory, choose_pins
from coli_server.routing import Selection

F32 = NDArray[np.float32]

log = logging.getLogger("coli.engine")

SAVE_SECONDS = 180.0


class Usage:
    """Learns what the router wants of decoded tokens, and keeps it in a file of `folder`.

    Substitutes of cache-aware routing teach nothing: what happened to be in memory would only confirm
    itself. An own file that cannot be used is reported and replaced at the next save.
    """

    def __init__(self, folder: Path, name: str, layers: Sequence[int], experts: int, identity: str) -> None:
        self.history = UsageHistory(layers, experts, identity)
        self.file = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:64]}-{identity[:16]}.json"
        self._saved = time.monotonic()
        try:
            if self.file.exists():
                self.history.load(self.file)
        except (HistoryError, OSError) as error:
            log.warning("the usage history is not used and will be replaced: %s", error)

    def observe(self, slot: int, group: RowGroup, selection: Selection, _: F32) -> None:
        """Take part in routing as a `RouteObserver`."""
        if group.counted is not None:
            self.history.observe(slot, selection.true[group.counted])

    def seconds_until_save(self) -> float | None:
        """When `save_when_due` wants to be called next; None when there is nothing to save."""
        if not self.history.changed:
            return None
        return max(0.0, self._saved + SAVE_SECONDS - time.monotonic())

    def save_when_due(self) -> None:
        """Save what was learned if the last time was some minutes ago."""
        if self.seconds_until_save() == 0.0:
            self.save()

    def save(self) -> None:
        """Save what was learned since the last time. A file that cannot be written is only reported."""
        self._saved = time.monotonic()
        if self.history.changed:
            try:
                self.history.save(self.file)
            except OSError as error:
                log.warning("the usage history cannot be saved: %s: %s", self.file, error.strerror)


def pin(
    cache: ExpertCache, history: UsageHistory, budget: int | None, progress: Callable[[int, int], None] | None
) -> None:
    """Load the most wanted experts of `history` for good, into at most `budget` bytes of the cache.

    `progress` gets how many are loaded, of how many. An expert that cannot be read is only reported: the
    model may be able to serve without it.
    """
    rooms = [cache.pin_room(layer) for layer in history.layers]
    sizes = [cache.slot_bytes(layer) for layer in history.layers]
    if budget is None:
        budget = sum(room * size for room, size in zip(rooms, sizes, strict=True)) // 2
    pins = choose_pins(history.counts, history.layers, rooms, sizes, budget)
    total, done = sum(len(experts) for experts in pins.values()), 0
    for layer, experts in pins.items():
        try:
            cache.pin(layer, experts)
        except ExpertReadError as error:
            log.warning("an expert is not pinned: %s", error)
        done += len(experts)
        if progress is not None:
            progress(done, total)


def identity_of(spec: ModelSpec, blocks: Iterable[MoeBlock]) -> str:
    """A digest of what decides which experts a model wants: its routers. 64 hexadecimal digits.

    A copy of the folder, or its experts stored in another type, is the same model for a usage history; a
    fine-tuned one is another.
    """
    moe = spec.moe
    digest = hashlib.sha256(repr((spec.model_type, spec.moe_layers, moe.experts, moe.k)).encode())
    for block in blocks:
        digest.update(block.router.data.data)
        for extra in (block.router.bias, block.correction):
            if extra is not None:
                digest.update(extra.data)
    return digest.hexdigest()
