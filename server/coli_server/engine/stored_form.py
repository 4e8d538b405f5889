"""How `coli convert` has stored a folder's weights: the section of config.json that says so.

Each routed expert is one tensor of bytes, `<layer prefix>experts.<number>`: an image of its slot, which one
read brings into memory. `experts` is the type of its weights; `dense` that of every other matrix whose tensor
is bytes. All other tensors are as in the original folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from coli_server.engine.config import Config
from coli_server.engine.kernels.formats import Kind, row_bytes

KEY = "coli_weights"
VERSION = 1

_ALIGNMENT = 64
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class StoredForm:
    """What the section says. `dense` is None where no other matrix is quantised."""

    experts: Kind
    dense: Kind | None

    def section(self) -> dict[str, object]:
        """The section as it is written."""
        dense = None if self.dense is None else self.dense.name
        return {"version": VERSION, "experts": self.experts.name, "dense": dense}


def read_form(config: Config) -> StoredForm | None:
    """The section of `config`, None where there is none. Raises ConfigError for one that is malformed."""
    section = config.section(KEY)
    if section is None:
        return None
    section.choice("version", (VERSION,))
    experts = Kind[section.choice("experts", tuple(kind.name for kind in Kind if kind.stored == kind))]
    dense = None
    if section.has("dense"):
        dense = Kind[section.choice("dense", tuple(kind.name for kind in Kind if kind.quantised))]
    section.finish()
    return StoredForm(experts, dense)


@dataclass(frozen=True, slots=True)
class ExpertImage:
    """Where the matrices and biases of an expert lie in its image, in bytes; -1 for biases it has not."""

    gate: int
    up: int
    down: int
    gate_bias: int
    up_bias: int
    down_bias: int
    nbytes: int

    @classmethod
    def of(cls, kind: Kind, hidden: int, width: int, *, biased: bool) -> ExpertImage:
        """gate and up [width, hidden], down [hidden, width] and, in float32, their biases, one behind the
        other on cache lines; whole pages, so that direct reads need no copy."""
        wide, narrow = width * row_bytes(kind, hidden), hidden * row_bytes(kind, width)
        at, starts = 0, []
        for size in (wide, wide, narrow, *([4 * width, 4 * width, 4 * hidden] if biased else [])):
            starts.append(at)
            at += size + -size % _ALIGNMENT
        gate, up, down, gate_bias, up_bias, down_bias = starts if biased else [*starts, -1, -1, -1]
        return cls(gate, up, down, gate_bias, up_bias, down_bias, at + -at % _PAGE)


def image_name(prefix: str, expert: int) -> str:
    """The tensor that holds an expert's image; `prefix` is its layer's."""
    return f"{prefix}experts.{expert}"
