"""How much memory the compiled kernels of a model take, known before they are compiled."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from coli_server.engine.kernels.runtime import code_cache_folder
from coli_server.engine.spec import ModelSpec

LOADED_BYTES = 96 << 20  # kernels that come from the code cache
COMPILED_BYTES = 288 << 20  # kernels that the compiler makes in this process, which keeps its memory


def code_bytes(spec: ModelSpec, kinds: Collection[int]) -> int:
    """What the kernels of a model will add to the process. Both figures are measured ones, rounded up."""
    return LOADED_BYTES if _marker(spec, kinds).exists() else COMPILED_BYTES


def remember_compiled(spec: ModelSpec, kinds: Collection[int]) -> None:
    """The code cache has everything that the model runs from now on."""
    with contextlib.suppress(OSError):  # the next start plans with more than it needs
        _marker(spec, kinds).touch()


def _marker(spec: ModelSpec, kinds: Collection[int]) -> Path:
    """A file in the code cache that stands for what `warm` compiles for such a model."""
    moe = spec.moe
    attention = sorted({repr(type(layer.attention)) for layer in spec.layers})
    variant = (sorted(kinds), attention, moe.router, moe.mxfp4, moe.expert_bias)
    digest = hashlib.sha256(f"{code_cache_folder().name} {variant!r}".encode()).hexdigest()
    folder = os.environ.get("NUMBA_CACHE_DIR") or code_cache_folder()
    return Path(folder) / f"compiled-{digest[:16]}"
