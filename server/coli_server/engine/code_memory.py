"""The code cache: how much memory a model's kernels will take, and what no version uses any more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from coli_server.engine.kernels.runtime import code_cache_folder
from coli_server.engine.spec import ModelSpec

LOADED_BYTES = 96 << 20  # kernels that come from the code cache
COMPILED_BYTES = 288 << 20  # kernels that the compiler makes in this process, which keeps its memory

KEPT_DAYS = 60
"""How long the code of another version stays after its latest start."""


def code_bytes(spec: ModelSpec, kinds: Collection[int]) -> int:
    """What the kernels of a model will add to the process. Both figures are measured ones, rounded up."""
    return LOADED_BYTES if _marker(spec, kinds).exists() else COMPILED_BYTES


def remember_compiled(spec: ModelSpec, kinds: Collection[int]) -> None:
    """The code cache has everything that the model runs from now on."""
    with contextlib.suppress(OSError):  # the next start plans with more than it needs
        _marker(spec, kinds).touch()


def remove_unused_code() -> list[Path]:
    """Remove and return the code cache folders of other versions that have not started for `KEPT_DAYS`.

    Every version of the kernels has its own folder of some ten MB, so they would add up. A folder that the
    user has named is left alone.
    """
    own = code_cache_folder()
    if os.environ.get("NUMBA_CACHE_DIR") != str(own):
        return []
    oldest = time.time() - 86400 * KEPT_DAYS
    unused = [
        folder for folder in own.parent.glob("kernels-*") if folder != own and _last_start(folder) < oldest
    ]
    for folder in unused:
        shutil.rmtree(folder, ignore_errors=True)
    return unused


def _last_start(folder: Path) -> float:
    """When kernels of `folder` were last made or asked for, in seconds of the epoch; now, if nobody knows."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.glob("compiled-*")))
    except OSError:  # another process is just removing it
        return time.time()


def _marker(spec: ModelSpec, kinds: Collection[int]) -> Path:
    """A file in the code cache that stands for what `warm` compiles for such a model."""
    moe = spec.moe
    attention = sorted({repr(type(layer.attention)) for layer in spec.layers})
    variant = (sorted(kinds), attention, moe.router, moe.mxfp4, moe.expert_bias)
    digest = hashlib.sha256(f"{code_cache_folder().name} {variant!r}".encode()).hexdigest()
    folder = os.environ.get("NUMBA_CACHE_DIR") or code_cache_folder()
    return Path(folder) / f"compiled-{digest[:16]}"
