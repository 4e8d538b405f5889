"""Which experts to keep in memory for good, given what routing has wanted so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def choose_pins(
    counts: NDArray[np.float64],
    layers: Sequence[int],
    room: Sequence[int],
    slot_bytes: Sequence[int],
    budget: int,
) -> Mapping[int, list[int]]:
    """For each layer the experts to pin, the most wanted first.

    counts      float64 [layers, experts]: usage
    layers      the model's numbers of those layers
    room        how many pins each layer may have
    slot_bytes  what one pin costs in each layer
    budget      bytes that all pins together may take

    The most wanted experts of all layers come first, by their share of their own layer's choices: a layer
    whose choices are even gets fewer pins than one with favourites. Experts never wanted are not pinned.
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    pins: dict[int, list[int]] = {layer: [] for layer in layers}
    for place in np.argsort(-shares, axis=None, kind="stable").tolist():
        slot, expert = divmod(place, counts.shape[1])
        if not shares[slot, expert]:
            break
        chosen = pins[layers[slot]]
        if len(chosen) < room[slot] and slot_bytes[slot] <= budget:
            chosen.append(expert)
            budget -= slot_bytes[slot]
    return {layer: chosen for layer, chosen in pins.items() if chosen}
