"""Store a model's weights in another form: quantised, and each expert in one piece that one read fetches.

The result is a folder like any other. Shards are written one after the other into `<out>.partial`; what a
broken-off run has left there is used again. At the end every shard is read back from the disk and compared
with what was meant to be written, the folder is opened as the engine opens it, and only then renamed.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.expert_files import RoutedExperts
from coli_server.engine.families.common import TensorNames
from coli_server.engine.kernels import ExpertShape, Kind, row_bytes
from coli_server.engine.kernels.formats import STORED_AS
from coli_server.engine.model import Checkpoint
from coli_server.engine.quantised import quantise
from coli_server.engine.spec import ModelSpec
from coli_server.engine.stored_form import KEY, ExpertImage, StoredForm, image_name
from coli_server.engine.weights import KINDS, to_float32
from coli_server.errors import ConfigurationError, ModelError
from coli_server.experts import CheckpointIndex, ExpertCache, TensorInfo
from coli_server.models.checkpoint import ALIGNMENT, write_synced
from coli_server.models.dense import bfloat16_bits

GROUPS = (32, 64, 128)
DEFAULT_GROUP = 32
_JOURNAL = "convert.json"
_CARRIED = (".json", ".jinja", ".model", ".txt", ".md")
_CHUNK = 1 << 22
_DENSE_SHARD = "model-dense.safetensors"

U8 = NDArray[np.uint8]
Bar = Callable[[int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is asked for: `bits` of the routed experts' weights, 16, 8 or 4; `dense_bits` of the other
    matrices, 16 or 8 (None: 16 beside 16, else 8); `group` weights share a scale."""

    bits: int
    dense_bits: int | None = None
    group: int = DEFAULT_GROUP

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("--bits", self.bits, (16, 8, 4)),
            ("--dense", self.dense_bits, (None, 16, 8)),
            ("--group", self.group, GROUPS),
        ):
            if value not in accepted:
                words = ", ".join(str(number) for number in accepted if number is not None)
                raise ConfigurationError(f"{name}={value} is not supported (accepted: {words})")

    def form(self, stored: Kind) -> StoredForm:
        """The form of a model whose experts are of type `stored`."""
        plain = Kind.F16 if stored == Kind.F16 else Kind.BF16
        experts = plain if self.bits == 16 else Kind.of(self.bits, self.group)
        dense_bits = self.dense_bits or (16 if self.bits == 16 else 8)
        return StoredForm(experts, Kind.of(8, self.group) if dense_bits == 8 else None)


def convert(source: Path, out: Path, conversion: Conversion, bar: Bar | None = None) -> None:
    """Convert the folder `source` into the new folder `out`.

    `bar` gets the bytes of `source` and gives what hears of those done. Memory: a few experts, and the
    largest other tensor. Raises ConfigurationError where `out` exists, ModelError for a source that cannot be
    converted and for a result that is not what was written.
    """
    if out.exists():
        raise ConfigurationError(f"{out} exists already: name a folder that does not")
    checkpoint = Checkpoint.open(source)
    if checkpoint.weights.form is not None:
        raise ModelError(f"{source} has been converted already: convert the original")
    form = conversion.form(Kind(checkpoint.experts[0].shape.kind))
    part = out.with_name(out.name + ".partial")
    part.mkdir(parents=True, exist_ok=True)
    journal = _Journal.open(part, _fingerprint(checkpoint, form))
    shards = _shards(checkpoint, form)
    with nullcontext(None) if bar is None else bar(sum(shard.nbytes for shard in shards)) as advance:
        for shard in shards:
            if not journal.has(shard.name):
                journal.write(shard)
            if advance is not None:
                advance(shard.nbytes)
    _write_rest(checkpoint, part, form)
    journal.verify()
    Checkpoint.open(part)
    journal.close()
    os.replace(part, out)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file to be written. `data` makes the values of `tensors`, one after the other; `nbytes` are those of
    the source's tensors that it stands for."""

    name: str
    nbytes: int
    tensors: list[_Tensor]
    data: Callable[[], Iterator[NDArray[Any]]]


def _shards(checkpoint: Checkpoint, form: StoredForm) -> list[_Shard]:
    """One for the experts of each layer, and one for everything else."""
    return [
        *(_expert_shard(checkpoint, experts, form) for experts in checkpoint.experts),
        _dense_shard(checkpoint, form),
    ]


def _expert_shard(checkpoint: Checkpoint, experts: RoutedExperts, form: StoredForm) -> _Shard:
    layer, count = experts.files.layer, experts.files.experts
    shape = experts.shape
    prefix = checkpoint.family.names.layer.format(layer=layer)
    size = ExpertImage.of(form.experts, shape.d, shape.f, biased=shape.down_bias >= 0).nbytes
    tensors = [_Tensor(image_name(prefix, expert), "U8", (size,), size) for expert in range(count)]
    name = f"model-experts-{layer:05d}.safetensors"
    return _Shard(name, count * experts.files.expert_bytes(), tensors, lambda: _images(experts, form.experts))


def _images(experts: RoutedExperts, kind: Kind) -> Iterator[U8]:
    """The image of each expert of a layer; two experts of the source are in memory at a time."""
    layer, size = experts.files.layer, experts.files.layout.slot_bytes
    cache = ExpertCache([experts.files], 2, readers=1)
    try:
        for expert in range(experts.files.experts):
            with cache.stream(layer, [expert]) as stream:
                address = int(next(stream).addresses[0])
                yield _image(
                    np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)),
                    experts.shape,
                    kind,
                )
    finally:
        cache.close()


def _image(slot: U8, shape: ExpertShape, kind: Kind) -> U8:
    """An expert's image from its slot."""
    stored, d, f = Kind(shape.kind), shape.d, shape.f
    place = ExpertImage.of(kind, d, f, biased=shape.down_bias >= 0)
    out = np.zeros(place.nbytes, np.uint8)

    def fill(at: int, offset: int, stride: int, rows: int, columns: int) -> None:
        size = row_bytes(stored, columns)
        matrix = np.lib.stride_tricks.as_strided(slot[offset:], (rows, size), (stride or size, 1))
        part = _stored_as(np.ascontiguousarray(matrix).view(STORED_AS[stored]), stored, kind)
        out[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)

    parts = [
        (place.gate, shape.gate_offset, shape.gate_stride, f, d),
        (place.up, shape.up_offset, shape.up_stride, f, d),
        (place.down, shape.down_offset, shape.down_stride, d, f),
    ]
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(fill, *part) for part in parts]:
            done.result()
    if shape.down_bias >= 0:
        for at, offset, step, count in (
            (place.gate_bias, shape.gate_bias, shape.gate_bias_stride, f),
            (place.up_bias, shape.up_bias, shape.up_bias_stride, f),
            (place.down_bias, shape.down_bias, shape.down_bias_stride, d),
        ):
            numbers = slot[offset : offset + 4 * (step * (count - 1) + 1)].view(np.float32)[::step]
            out[at : at + 4 * count] = np.ascontiguousarray(numbers).view(np.uint8)
    return out


def _stored_as(matrix: NDArray[Any], stored: Kind, kind: Kind) -> NDArray[Any]:
    """A matrix of type `stored` as one of type `kind`."""
    if stored == kind:
        return matrix
    wide = to_float32(matrix, stored)
    if kind == Kind.BF16:
        return bfloat16_bits(wide)
    try:
        return quantise(wide, kind)
    except ValueError as error:
        raise ModelError(f"an expert cannot be quantised: {error}") from None


def _dense_shard(checkpoint: Checkpoint, form: StoredForm) -> _Shard:
    """Everything but the routed experts, as it is or, where it is a matrix of the decoder, quantised."""
    spec, names, routed = checkpoint.spec, checkpoint.family.names, checkpoint.weights.asked
    linear = re.compile("|".join(_matrices(spec, names)))
    twice = f"{names.head}.weight" if spec.tied_embeddings else None
    kept = [info for info in checkpoint.needed if info.name not in routed and info.name != twice]
    plans = [
        (info, form.dense if len(info.shape) == 2 and linear.fullmatch(info.name) else None) for info in kept
    ]
    return _Shard(
        _DENSE_SHARD,
        checkpoint.dense_bytes,
        [_planned(info, kind) for info, kind in plans],
        lambda: (_dense(checkpoint.weights.index, info, kind) for info, kind in plans),
    )


def _planned(info: TensorInfo, kind: Kind | None) -> _Tensor:
    if kind is None:
        return _Tensor(info.name, info.dtype, info.shape, info.nbytes)
    rows, size = info.shape[0], row_bytes(kind, info.shape[1])
    return _Tensor(info.name, "U8", (rows, size), rows * size)


def _dense(index: CheckpointIndex, info: TensorInfo, kind: Kind | None) -> NDArray[Any]:
    data = index.read(info.name)
    if kind is None:
        return data
    try:
        return quantise(to_float32(data, KINDS[info.dtype]), kind)
    except ValueError as error:
        raise ModelError(f"{info.file}: tensor {info.name}: {error}") from None


def _matrices(spec: ModelSpec, names: TensorNames) -> list[str]:
    """Regular expressions of the names of matrices that may be quantised.

    Not among them: routers and gates, which decide; the halves of latent attention that are applied head by
    head; sparse indexers; an embedding table that is not the head, too.
    """
    layer = re.escape(names.layer).replace(re.escape("{layer}"), r"\d+")
    inner = (names.q, names.k, names.v, names.out, names.q_a, names.q_b, names.kv_a)
    parts = [re.escape(name) for name in (*inner, *names.dense, *names.shared)]
    head = names.embeddings if spec.tied_embeddings else f"{names.head}.weight"
    return [rf"{layer}(?:{'|'.join(parts)})\.weight", re.escape(head)]


class _Journal:
    """Which shards of a conversion are complete, with their digests; kept in a file of the folder."""

    def __init__(self, folder: Path, fingerprint: str, digests: dict[str, str]) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._digests = digests

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> _Journal:
        """What an earlier run of the very same conversion has left; anything else is removed."""
        try:
            left = json.loads((folder / _JOURNAL).read_text())
            if left["fingerprint"] == fingerprint:
                return cls(folder, fingerprint, {str(k): str(v) for k, v in left["digests"].items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        shutil.rmtree(folder)
        folder.mkdir()
        return cls(folder, fingerprint, {})

    def has(self, shard: str) -> bool:
        return shard in self._digests and (self._folder / shard).exists()

    def write(self, shard: _Shard) -> None:
        """Write and sync a shard, then note it."""
        self._digests[shard.name] = _write_shard(self._folder / shard.name, shard)
        _write_json(self._folder / _JOURNAL, {"fingerprint": self._fingerprint, "digests": self._digests})

    def verify(self) -> None:
        """Read every shard back from the disk. Raises ModelError for one that differs."""
        for shard, digest in self._digests.items():
            if _digest_on_disk(self._folder / shard) != digest:
                (self._folder / shard).unlink()
                raise ModelError(f"{self._folder / shard}: read back differently from what was written")

    def close(self) -> None:
        (self._folder / _JOURNAL).unlink()


def _write_shard(file: Path, shard: _Shard) -> str:
    """Write a safetensors file whose data begins at a whole page; its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard.tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        pieces: Iterator[bytes | memoryview] = itertools.chain(
            [len(text).to_bytes(8, "little"), text],
            (np.ascontiguousarray(data).reshape(-1).view(np.uint8).data for data in shard.data()),
        )
        for piece in pieces:
            stream.write(piece)
            digest.update(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file as a whole."""
    fresh = file.with_name(file.name + ".new")
    write_synced(fresh, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    os.replace(fresh, file)


def _digest_on_disk(file: Path) -> str:
    """SHA-256 of a file's bytes, as the disk has them: its cached pages are dropped first."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fingerprint(checkpoint: Checkpoint, form: StoredForm) -> str:
    """What a conversion depends on: the form, and the source's files by name, size and time."""
    digest = hashlib.sha256(repr(form).encode())
    digest.update((checkpoint.folder / "config.json").read_bytes())
    for file in sorted({info.file for info in checkpoint.weights.index.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write_rest(checkpoint: Checkpoint, part: Path, form: StoredForm) -> None:
    """Configuration, index, and every small file of the source that goes along."""
    config = json.loads((checkpoint.folder / "config.json").read_bytes())
    config.pop("quantization_config", None)  # it is undone
    _write_json(part / "config.json", config | {KEY: form.section()})
    for file in sorted(checkpoint.folder.iterdir()):
        carried = file.suffix in _CARRIED or file.name.startswith("LICENSE")
        known = file.name in ("config.json", "coli.json", "model.safetensors.index.json")
        if file.is_file() and carried and not known:
            write_synced(part / file.name, file.read_bytes())
    (part / "model.safetensors.index.json").unlink(missing_ok=True)
    index = CheckpointIndex.open(part)
    weight_map = {name: info.file.name for name, info in sorted(index.items())}
    total = {"total_size": index.nbytes}
    _write_json(part / "model.safetensors.index.json", {"metadata": total, "weight_map": weight_map})
