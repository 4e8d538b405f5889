"""The decoder: embeddings, layers, head. Arrays in, arrays out; all state is in the step's sequences."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.attention import AttentionBlock, load_attention
from coli_server.engine.config import IRRELEVANT, Config, ConfigError
from coli_server.engine.expert_files import RoutedExperts, routed_experts
from coli_server.engine.families import family_of
from coli_server.engine.families.common import Family, TensorNames
from coli_server.engine.kv import KvWidths, kv_widths
from coli_server.engine.moe import MoeBlock, ResidentMlp, RouteObserver
from coli_server.engine.norms import Norm
from coli_server.engine.pilot import Pilot
from coli_server.engine.rope import angles
from coli_server.engine.spec import ModelSpec, MoeMlp, RopeSpec
from coli_server.engine.step import Step
from coli_server.engine.stored_form import read_form
from coli_server.engine.use import RouteUse
from coli_server.engine.weights import HeadersOnly, Matrix, Weights
from coli_server.engine.workspace import Workspace
from coli_server.experts import CheckpointIndex, ExpertCache, TensorInfo
from coli_server.ranges import Activations

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder whose configuration and headers have been read and understood; no weights yet."""

    folder: Path
    family: Family
    spec: ModelSpec
    weights: Weights
    experts: tuple[RoutedExperts, ...]  # one for each MoE layer, in layer order
    end_ids: frozenset[int]

    @classmethod
    def open(cls, folder: Path, activations: Activations = "float32") -> Checkpoint:
        """Read config.json and the headers of all shards, and compare them with each other.

        Products of bfloat16 weights will round activations to `activations`. Raises ConfigError or
        CheckpointError.
        """
        config = Config.load(folder / "config.json")
        form = read_form(config)
        family, spec, end_ids = cls.read_config(config, folder)
        weights = Weights(CheckpointIndex.open(folder), form, activations)
        experts = tuple(routed_experts(weights, family.names, spec, layer) for layer in spec.moe_layers)
        checkpoint = cls(folder, family, spec, weights, experts, end_ids)
        # Every tensor's name, shape and type, before memory is planned or taken; no expert is asked for.
        Model(replace(checkpoint, weights=HeadersOnly(weights)), cast("ExpertCache", None))
        return checkpoint

    @property
    def needed(self) -> tuple[TensorInfo, ...]:
        """Every tensor but those that inference does not need."""
        layers = _beyond(len(self.spec.layers))
        ignored = [re.compile(pattern.replace("{beyond}", layers)) for pattern in self.family.ignored]
        return tuple(
            tensor
            for name, tensor in self.weights.index.items()
            if not any(pattern.fullmatch(name) for pattern in ignored)
        )

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tensors that stay in memory, as they are stored."""
        routed = sum(e.files.experts * e.files.expert_bytes() for e in self.experts)
        return sum(tensor.nbytes for tensor in self.needed) - routed

    @staticmethod
    def read_config(config: Config, folder: Path) -> tuple[Family, ModelSpec, frozenset[int]]:
        """Family, description and end tokens of the model whose config.json is `config`.

        Raises ConfigError for a key or value that is not understood.
        """
        family = family_of(config)
        spec = family.read(config)
        end_ids = _end_ids(folder, config, spec.vocab)
        config.finish(IRRELEVANT | family.irrelevant)
        if not spec.moe_layers:
            decide = ", ".join(key for key in _WHICH_LAYERS if config.has(key))
            raise ConfigError(f"{folder}: no layer of this model has routed experts (see {decide})")
        return family, spec, end_ids


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: ResidentMlp | MoeBlock
    rope: int | None  # which of the model's ropes turns its queries and keys


class Model:
    """A loaded decoder. Only the engine thread calls `forward`."""

    def __init__(self, checkpoint: Checkpoint, cache: ExpertCache, *, pilot: bool = False) -> None:
        """Read all dense weights of `checkpoint`; routed experts are read through `cache` when they run.

        With `pilot`, which can be switched between steps, each MoE layer also prefetches what the next one
        will probably choose.

        Raises CheckpointError or ModelError for a tensor that is missing, misshapen or unknown.
        """
        spec, names = checkpoint.spec, checkpoint.family.names
        weights = checkpoint.weights
        self.spec = spec
        self.widths: tuple[KvWidths, ...] = tuple(kv_widths(layer.attention) for layer in spec.layers)
        self.use = RouteUse(len(spec.moe_layers), spec.moe.experts)
        self.observers: list[RouteObserver] = [self.use]
        self._workspace = Workspace()
        self._embeddings = weights.embeddings(names.embeddings, spec.vocab, spec.hidden)
        self._ropes: list[RopeSpec] = []
        self._layers = [self._load_layer(checkpoint, i, cache) for i in range(len(spec.layers))]
        routed = [(layer.mlp_norm, layer.mlp) for layer in self._layers if isinstance(layer.mlp, MoeBlock)]
        self.pilot = pilot
        self._pilots = {b.slot - 1: Pilot(norm, b) for norm, b in routed[1:]}
        # The norm behind each layer: the next one's attention norm, or the last of all.
        final = Norm.load(weights, names.final_norm, spec.hidden, spec.norm)
        self._following = [*(layer.attention_norm for layer in self._layers[1:]), final]
        self._head = self._load_head(weights, names)
        weights.refuse_unknown(
            [pattern.replace("{beyond}", _beyond(len(spec.layers))) for pattern in checkpoint.family.ignored]
        )
        self.dense_bytes = weights.nbytes

    @property
    def routed(self) -> list[MoeBlock]:
        """The MoE layers, in order."""
        return [layer.mlp for layer in self._layers if isinstance(layer.mlp, MoeBlock)]

    def forward(self, step: Step) -> F32:
        """Run the rows of `step`; writes their keys and values, and returns the logits that spans want.

        float32 [wanted rows, vocab], in span order: the last row of a span, all of them, or none. The
        caller declares the step finished (`Step.finish`), so a step that fails leaves no trace in the KV.
        """
        spec = self.spec
        x = self._embeddings.rows(step.ids)
        if spec.embedding_multiplier != 1.0:
            x *= np.float32(spec.embedding_multiplier)
        turned = [angles(rope, step.positions, step.lengths) for rope in self._ropes]
        multiplier = np.float32(spec.residual_multiplier)
        normed = self._layers[0].attention_norm(x)
        for layer, following in zip(self._layers, self._following, strict=True):
            rope = None if layer.rope is None else turned[layer.rope]
            attended = layer.attention.forward(normed, step, rope)
            normed = layer.mlp_norm.behind(x, attended, multiplier)
            if isinstance(layer.mlp, MoeBlock):
                ahead = self._look_ahead(layer.mlp, x, step)
                out = layer.mlp.forward(normed, step, self._workspace, ahead)
                step.layers += 1
            else:
                out = layer.mlp.forward(normed, self._workspace)
            normed = following.behind(x, out, multiplier)
        return self._logits(normed[_wanted(step)])

    def _look_ahead(self, block: MoeBlock, x: F32, step: Step) -> Callable[[F32], None] | None:
        """What prefetches for the MoE layer behind `block`, whose residual input is `x`; None: nothing."""
        pilot = self._pilots.get(block.slot)
        if pilot is None or not self.pilot:
            return None
        multiplier = np.float32(self.spec.residual_multiplier)
        return lambda resident: pilot.look_ahead(x + resident * multiplier, step)

    def _logits(self, x: F32) -> F32:
        """Logits of normalised rows."""
        if not len(x):
            return np.empty((0, self.spec.vocab), np.float32)
        logits = self._head(x)
        if self.spec.logits_divisor != 1.0:
            logits /= np.float32(self.spec.logits_divisor)
        return logits

    def _load_layer(self, checkpoint: Checkpoint, i: int, cache: ExpertCache) -> Layer:
        spec, weights, names = self.spec, checkpoint.weights, checkpoint.family.names
        prefix, layer = names.layer.format(layer=i), spec.layers[i]
        mlp: ResidentMlp | MoeBlock
        if isinstance(layer.mlp, MoeMlp):
            slot = spec.moe_layers.index(i)
            shape = checkpoint.experts[slot].shape
            mlp = MoeBlock.load(weights, names, layer.mlp, i, spec.hidden, shape, slot, cache, self.observers)
        else:
            dense = (prefix + names.dense[0], prefix + names.dense[1], prefix + names.dense[2])
            mlp = ResidentMlp.load(weights, dense, spec.hidden, layer.mlp)
        return Layer(
            Norm.load(weights, prefix + names.attention_norm, spec.hidden, spec.norm),
            load_attention(weights, names, layer.attention, i, spec.hidden, spec.norm.eps),
            Norm.load(weights, prefix + names.mlp_norm, spec.hidden, spec.norm),
            mlp,
            self._rope_number(layer.attention.rope),
        )

    def _rope_number(self, rope: RopeSpec | None) -> int | None:
        if rope is None:
            return None
        if rope not in self._ropes:
            self._ropes.append(rope)
        return self._ropes.index(rope)

    def _load_head(self, weights: Weights, names: TensorNames) -> Matrix:
        spec = self.spec
        if not spec.tied_embeddings:
            return weights.matrix([names.head], [spec.vocab], spec.hidden, bias=spec.head_bias)
        if weights.has(f"{names.head}.weight"):  # some checkpoints store the tied matrix twice
            weights.info(f"{names.head}.weight", spec.vocab, spec.hidden)
        return self._embeddings


# Keys of the families that say which layers have routed experts.
_WHICH_LAYERS = (
    "num_hidden_layers",
    "first_k_dense_replace",
    "moe_layer_freq",
    "mlp_layer_types",
    "mlp_only_layers",
    "decoder_sparse_step",
)


def _end_ids(folder: Path, config: Config, vocab: int) -> frozenset[int]:
    """End tokens: those of generation_config.json where it names any, else those of config.json."""
    ids = config.token_ids("eos_token_id", vocab)
    path = folder / "generation_config.json"
    if path.exists():
        ids = Config.load(path).token_ids("eos_token_id", vocab) or ids
    return frozenset(ids)


def _wanted(step: Step) -> NDArray[np.intp]:
    """The rows whose logits are wanted."""
    rows: list[int] = []
    for i, span in enumerate(step.spans):
        first, last = step.first[i], step.first[i + 1]
        rows += {"none": [], "last": [last - 1], "all": list(range(first, last))}[span.want]
    return np.array(rows, np.intp)


def _beyond(layers: int) -> str:
    """A regular expression of layer numbers from `layers` on."""
    return rf"(?:(?!(?:{'|'.join(str(i) for i in range(layers))})\.)\d+)"
