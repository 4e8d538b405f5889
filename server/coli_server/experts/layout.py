"""How one expert lies in its slot, and which bytes of which files bring it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError
from coli_server.experts.safetensors_header import TensorSlice

PART_ALIGNMENT = 64  # a cache line and the widest vector
PAGE = 4096
_PAGE_ALIGNED_FROM = 64 * 1024  # from this size rounding a slot up to whole pages costs under 7 %

Bytes = NDArray[np.uint8]
Transform = Callable[[Mapping[str, Bytes], Mapping[str, Bytes]], None]


def align(value: int, alignment: int) -> int:
    """`value` rounded up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Part:
    """`nbytes` of a slot, or of the staging buffer, from `offset`."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The same for every expert of a layer: what is stored, and where it goes in the slot.

    `parts` are the slot's named pieces, each 64-byte aligned; `slot_bytes` is the distance of two slots.
    A stored piece with a slot part's name and size is read straight into it. Every other one (`staged`,
    offsets in a staging buffer of `staging_bytes`) is handed to `transform(stored, slot)`, which runs on a
    read thread, sees uint8 views by name (`slot` holds all slot parts) and must fill the remaining parts.
    """

    stored: Mapping[str, int]
    parts: Mapping[str, Part]
    slot_bytes: int
    staged: Mapping[str, Part] = field(default_factory=dict)
    staging_bytes: int = 0
    transform: Transform | None = None

    @classmethod
    def plain(cls, stored: Mapping[str, int]) -> ExpertLayout:
        """The slot holds the stored pieces (name to bytes) as they are, in this order."""
        parts, size = _place(stored.items())
        return cls(dict(stored), parts, _slot_bytes(size))

    @classmethod
    def transformed(
        cls, stored: Mapping[str, int], slot: Mapping[str, int], transform: Transform
    ) -> ExpertLayout:
        """The slot holds the parts `slot` (name to bytes); `transform` makes those not stored so."""
        parts, size = _place(slot.items())
        staged, staging = _place(
            (name, nbytes) for name, nbytes in stored.items() if slot.get(name) != nbytes
        )
        return cls(dict(stored), parts, _slot_bytes(size), staged, align(staging, PAGE), transform)


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """Where one expert's stored pieces are: name to bytes of a file."""

    parts: Mapping[str, TensorSlice]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Every expert of one MoE layer; `layer` is the model's own layer number.

    Raises ModelError when an expert's pieces are not those that the layout stores.
    """

    layer: int
    layout: ExpertLayout
    sources: Sequence[ExpertSource]

    def __post_init__(self) -> None:
        if not self.sources or not self.expert_bytes():
            raise ModelError(f"layer {self.layer}: no experts, or experts without weights")
        for expert, source in enumerate(self.sources):
            sizes = {name: piece.nbytes for name, piece in source.parts.items()}
            if sizes != self.layout.stored:
                raise ModelError(
                    f"layer {self.layer}, expert {expert}: stored pieces {sizes} differ from the layer's "
                    f"{dict(self.layout.stored)} (bytes)"
                )

    @property
    def experts(self) -> int:
        return len(self.sources)

    def expert_bytes(self) -> int:
        """Bytes read from files for one expert."""
        return sum(self.layout.stored.values())


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a run of a read's bytes goes: into the slot or, if `staged`, into the staging buffer."""

    staged: bool
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileRead:
    """One preadv: contiguous bytes of `file` scattered over `segments`."""

    file: Path
    offset: int
    segments: tuple[Segment, ...]


def plan_reads(layout: ExpertLayout, source: ExpertSource) -> tuple[FileRead, ...]:
    """The fewest reads that fetch exactly this expert's bytes, in order of file and offset.

    Pieces that follow each other in a file become one read; no byte of anything else is read.
    """
    pieces = sorted(source.parts.items(), key=lambda item: (str(item[1].file), item[1].offset))
    reads: list[tuple[Path, int, list[Segment]]] = []
    end: tuple[Path, int] | None = None
    for name, piece in pieces:
        if not piece.nbytes:
            continue
        staged = name in layout.staged
        target = (layout.staged if staged else layout.parts)[name]
        segment = Segment(staged, target.offset, piece.nbytes)
        if (piece.file, piece.offset) == end:
            _append(reads[-1][2], segment)
        else:
            reads.append((piece.file, piece.offset, [segment]))
        end = (piece.file, piece.offset + piece.nbytes)
    return tuple(FileRead(file, offset, tuple(segments)) for file, offset, segments in reads)


def _append(segments: list[Segment], new: Segment) -> None:
    """Add a segment, joined to the last one when it also follows it in memory."""
    last = segments[-1]
    if last.staged == new.staged and last.offset + last.nbytes == new.offset:
        segments[-1] = Segment(last.staged, last.offset, last.nbytes + new.nbytes)
    else:
        segments.append(new)


def _place(sizes: Iterable[tuple[str, int]]) -> tuple[dict[str, Part], int]:
    """Aligned parts one behind the other, and where they end."""
    parts: dict[str, Part] = {}
    end = 0
    for name, nbytes in sizes:
        parts[name] = Part(align(end, PART_ALIGNMENT), nbytes)
        end = parts[name].offset + nbytes
    return parts, end


def _slot_bytes(used: int) -> int:
    """Small slots are packed by cache lines; large ones begin on pages, as direct reads want them."""
    return align(max(used, 1), PAGE if used >= _PAGE_ALIGNED_FROM else PART_ALIGNMENT)
