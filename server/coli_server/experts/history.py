"""What routing has wanted so far: decaying counts for each layer and expert, kept in a file between runs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ColiError
from coli_server.experts.safetensors_header import load_json

HALF_LIFE = 20_000  # tokens after which a choice counts half
FORMAT = "coli-usage"
VERSION = 1

_FOLD = 256  # tokens of a layer that are added together
_MAX_FILE_BYTES = 1 << 26
_LARGEST_COUNT = 1e15

F64 = NDArray[np.float64]


class HistoryError(ColiError):
    """A usage history that cannot be used; the message names the file and the reason."""


class UsageHistory:
    """How often the router itself wanted each expert of each MoE layer, younger choices counting more.

    `layers` are the model's numbers of its MoE layers; a layer's place among them is its slot. `identity`
    says which model the counts are about.
    """

    def __init__(self, layers: Sequence[int], experts: int, identity: str) -> None:
        self.layers = tuple(layers)
        self.identity = identity
        self.changed = False
        self._counts = np.zeros((len(self.layers), experts), np.float64)
        self._pending: list[list[NDArray[np.int32]]] = [[] for _ in self.layers]
        self._rows = [0] * len(self.layers)

    @property
    def experts(self) -> int:
        return self._counts.shape[1]

    @property
    def counts(self) -> F64:
        """The decayed counts, float64 [layers, experts]."""
        for slot in range(len(self.layers)):
            self._fold(slot)
        return self._counts

    def observe(self, slot: int, true: NDArray[np.int32]) -> None:
        """Add the router's true choices of some tokens in one layer, int32 [tokens, k]. Keeps the array."""
        self._pending[slot].append(true)
        self._rows[slot] += len(true)
        self.changed = True
        if self._rows[slot] >= _FOLD:
            self._fold(slot)

    def _fold(self, slot: int) -> None:
        if self._rows[slot]:
            chosen = np.concatenate([rows.reshape(-1) for rows in self._pending[slot]])
            self._counts[slot] *= 0.5 ** (self._rows[slot] / HALF_LIFE)
            self._counts[slot] += np.bincount(chosen, minlength=self.experts)
            self._pending[slot].clear()
            self._rows[slot] = 0

    def save(self, file: Path) -> None:
        """Write the counts: the file is the old one or the new one, whole, whatever happens meanwhile.

        Raises OSError.
        """
        document = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.identity,
            "experts": self.experts,
            "layers": {
                str(layer): [round(count, 3) for count in row]
                for layer, row in zip(self.layers, self.counts.tolist(), strict=True)
            },
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                json.dump(document, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self.changed = False

    def load(self, file: Path) -> None:
        """Take over the counts of `file`. Raises HistoryError, and then nothing has changed."""
        self._counts = self._checked(_document(file), file)
        self._pending = [[] for _ in self.layers]
        self._rows = [0] * len(self.layers)
        self.changed = False

    def _checked(self, document: object, file: Path) -> F64:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise HistoryError(f"{file}: not a usage history")
        if document.get("version") != VERSION:
            raise HistoryError(
                f"{file}: version {document.get('version')!r:.20} is not known (accepted: {VERSION})"
            )
        if document.get("model") != self.identity:
            raise HistoryError(f"{file}: was learned on another model")
        rows = document.get("layers")
        if not isinstance(rows, dict) or list(rows) != [str(layer) for layer in self.layers]:
            raise HistoryError(f"{file}: its layers are not those of the model")
        counts = np.empty_like(self._counts)
        for slot, (layer, row) in enumerate(rows.items()):
            if not isinstance(row, list) or len(row) != self.experts or not all(map(_is_count, row)):
                raise HistoryError(
                    f"{file}: layer {layer} must have {self.experts} counts from 0 to {_LARGEST_COUNT:g}"
                )
            counts[slot] = row
        return counts


def _document(file: Path) -> object:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise HistoryError(f"{file}: larger than {_MAX_FILE_BYTES} bytes")
        return load_json(file.read_bytes(), file)
    except OSError as error:
        raise HistoryError(f"{file}: {error.strerror}") from None
    except HistoryError:
        raise
    except ColiError as error:  # broken, or cut short
        raise HistoryError(str(error)) from None


def _is_count(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST_COUNT  # type: ignore[operator]
