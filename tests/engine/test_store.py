"""How experts are read never changes what is computed, and a plan accounts for what reading needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.memory import plan_memory
from coli_server.engine.model import Checkpoint
from coli_server.engine.store import StoreOptions
from coli_server.errors import ConfigurationError
from support.served import MODELS, TINY

PROMPT = np.load(TINY / "expected.npz")["ids_1"].tolist()


def logits(store: StoreOptions) -> bytes:
    engine = Engine.open(TINY, experts_per_layer=4, warm=False, store=store)
    try:
        return engine.logits(PROMPT).tobytes()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain() -> bytes:
    return logits(StoreOptions())


@pytest.mark.parametrize(
    "store",
    [
        StoreOptions(direct=True),
        StoreOptions(direct=True, readers=1, pilot=True),
        StoreOptions(mirror=TINY),
        StoreOptions(mirror=TINY, direct=True, evict="learned"),
        StoreOptions(evict="lfu", readers=9),
    ],
    ids=lambda store: (
        f"direct={store.direct},mirror={store.mirror is not None},{store.evict},{store.readers}"
    ),
)
def test_the_way_of_reading_changes_no_bit(store: StoreOptions, plain: bytes) -> None:
    assert logits(store) == plain


def test_a_mirror_of_another_model_is_refused(tmp_path: Path) -> None:
    shutil.copy(MODELS / "deepseek_v3" / "model.safetensors", tmp_path)
    with pytest.raises(ConfigurationError, match=r"--mirror=.* is not a copy of"):
        Engine.open(TINY, warm=False, store=StoreOptions(mirror=tmp_path))


def test_buffers_of_direct_reads_are_part_of_the_budget() -> None:
    checkpoint = Checkpoint.open(TINY)
    least = []
    for store in (StoreOptions(), StoreOptions(direct=True, readers=64)):
        with pytest.raises(ConfigurationError, match="the least that works is"):
            plan_memory(checkpoint, 1 << 20, None, None, 256, store=store)
        least.append(plan_memory(checkpoint, 1 << 34, None, None, 256, store=store))
    assert least[0].slots_per_layer == least[1].slots_per_layer
