"""A record of routing in a file: what the router wanted, how sure it was, and what ran.

The file is a JSON header and then fixed-size records, one for each token and MoE layer, only ever appended.
A crash can leave half a record at the end and nothing else; readers drop it.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.step import RowGroup, Sequence
from coli_server.errors import ConfigurationError
from coli_server.routing import Selection

F32 = NDArray[np.float32]

log = logging.getLogger("coli.engine")

MAGIC = b"COLITRC1"
PROMPT = 1  # flag: the token is a prompt's

_BUFFER_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 16
_MAX_FOLLOWED = 1024


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Whose routing the file records. `layers` are the model's numbers of its MoE layers."""

    model: str
    identity: str
    layers: tuple[int, ...]
    experts: int
    k: int

    @property
    def record(self) -> np.dtype[Any]:
        """One token in one layer. `slot` is the layer's place among the MoE layers; `scores` rank `true`."""
        return np.dtype(
            [
                ("step", "<u4"),
                ("sequence", "<u4"),
                ("position", "<u4"),
                ("slot", "<u2"),
                ("flags", "<u2"),
                ("true", "<u2", self.k),
                ("chosen", "<u2", self.k),
                ("scores", "<f4", self.k),
            ]
        )

    def to_bytes(self) -> bytes:
        fields = {
            "model": self.model,
            "identity": self.identity,
            "layers": self.layers,
            "experts": self.experts,
            "k": self.k,
        }
        raw = json.dumps(fields).encode()
        return MAGIC + struct.pack("<I", len(raw)) + raw


class RoutingTrace:
    """Writes a trace. An observer of routing; it never fails a request.

    Goes on behind what `file` holds already. Raises ConfigurationError for a file that is no trace of this
    model, or cannot be written.
    """

    def __init__(self, file: Path, header: TraceHeader) -> None:
        self._file = file
        self._header = header
        self._record = header.record
        self._buffer = bytearray()
        self._numbers: dict[int, tuple[int, int]] = {}  # by id of a sequence: its number, its last position
        self._step = self._sequences = 0
        self._slot = -1
        try:
            self._stream = open(file, "a+b", buffering=0)  # noqa: SIM115 (held as long as the trace runs)
        except OSError as error:
            raise ConfigurationError(f"--trace={file}: {error.strerror}") from None
        try:
            self._go_on()
        except OSError as error:
            self._stream.close()
            raise ConfigurationError(f"--trace={file}: {error.strerror}") from None
        except ConfigurationError:
            self._stream.close()
            raise

    def observe(self, slot: int, group: RowGroup, selection: Selection, scores: F32) -> None:
        """Take part in routing as a `RouteObserver`."""
        if slot < self._slot or len(self._header.layers) == 1:
            self._step += 1
        self._slot = slot
        rows = np.zeros(len(selection.true), self._record)
        rows["step"] = self._step
        rows["slot"] = slot
        for first, span in group.members:
            part = rows[first : first + len(span.ids)]
            start = span.sequence.position
            part["sequence"] = self._number(span.sequence, start)
            part["position"] = np.arange(start, start + len(part))
            part["flags"] = PROMPT if span.prompt else 0
        rows["true"] = selection.true
        rows["chosen"] = selection.experts
        rows["scores"] = np.take_along_axis(scores, selection.true, axis=1)
        self._buffer += rows.tobytes()
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the system. A disk that fails ends the trace, with one warning."""
        if self._stream.closed or not self._buffer:
            return
        try:
            # One write of whole records: where it is cut short, the next one would begin in mid-record.
            if self._stream.write(self._buffer) != len(self._buffer):
                raise OSError(28, os.strerror(28))
        except OSError as error:
            log.warning("the trace ends here: %s: %s", self._file, error.strerror)
            self._stream.close()
        self._buffer.clear()

    def close(self) -> None:
        self.flush()
        self._stream.close()

    def _go_on(self) -> None:
        """Write the header, or check the one that is there and cut off half a record behind the others."""
        head = self._header.to_bytes()
        size = self._stream.seek(0, os.SEEK_END)
        if not size:
            self._stream.write(head)
            return
        header, start = _read_header(self._file)
        if header != self._header:
            raise ConfigurationError(
                f"--trace={self._file}: is a trace of another model, {header.model!r:.80}"
            )
        whole = (size - start) // self._record.itemsize
        self._stream.truncate(start + whole * self._record.itemsize)
        if whole:
            self._stream.seek(start + (whole - 1) * self._record.itemsize)
            last = np.frombuffer(self._stream.read(self._record.itemsize), self._record)[0]
            self._step = int(last["step"]) + 1
            self._sequences = int(last["sequence"]) + _MAX_FOLLOWED

    def _number(self, sequence: Sequence, position: int) -> int:
        """A number for the sequence. One that goes back is another, in the place of one that is gone."""
        number, last = self._numbers.get(id(sequence), (0, -1))
        if last < 0 or position < last:
            if len(self._numbers) >= _MAX_FOLLOWED:
                self._numbers.clear()
            self._sequences += 1
            number = self._sequences
        self._numbers[id(sequence)] = (number, position)
        return number


def read_trace(file: Path) -> tuple[TraceHeader, NDArray[Any]]:
    """The header of a trace and its whole records, in the order in which they were routed.

    Raises ConfigurationError naming the file where it is no trace.
    """
    header, start = _read_header(file)
    whole = (file.stat().st_size - start) // header.record.itemsize
    records = np.fromfile(file, header.record, whole, offset=start)
    if len(records) and (records["slot"].max() >= len(header.layers) or _highest(records) >= header.experts):
        raise ConfigurationError(f"{file}: names layers or experts that the model does not have")
    return header, records


def _highest(records: NDArray[Any]) -> int:
    return int(max(records["true"].max(), records["chosen"].max()))


def _read_header(file: Path) -> tuple[TraceHeader, int]:
    """The header, and where the records begin."""
    try:
        with file.open("rb") as stream:
            head = stream.read(len(MAGIC) + 4)
            size = struct.unpack("<I", head[len(MAGIC) :])[0] if head[: len(MAGIC)] == MAGIC else 0
            raw = stream.read(size) if size <= _MAX_HEADER_BYTES else b""
        fields = json.loads(raw)
        header = TraceHeader(
            str(fields["model"]),
            str(fields["identity"]),
            tuple(int(layer) for layer in fields["layers"]),
            int(fields["experts"]),
            int(fields["k"]),
        )
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, struct.error, RecursionError):
        raise ConfigurationError(f"{file}: is not a routing trace") from None
    if not (header.layers and 0 < header.k <= header.experts <= 1 << 16):
        raise ConfigurationError(f"{file}: is not a routing trace")
    return header, len(head) + size
