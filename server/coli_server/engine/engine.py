"""A model that can run: weights, expert cache, tokenizer, and the step that moves sequences forward."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.api import SamplingOptions
from coli_server.engine.code_memory import remember_compiled, remove_unused_code
from coli_server.engine.kv import KvCache
from coli_server.engine.memory import MemoryPlan, default_ram, plan_memory
from coli_server.engine.model import Checkpoint, Model
from coli_server.engine.rope import length_threshold
from coli_server.engine.sampler import Sampler
from coli_server.engine.step import RouteState, Sequence, Span, Step
from coli_server.engine.store import DEFAULT_STORE, StoreOptions, make_reader
from coli_server.engine.text import Text
from coli_server.engine.trace import RoutingTrace, TraceHeader
from coli_server.engine.usage import Usage, identity_of, pin
from coli_server.engine.warm import warm as warm_kernels
from coli_server.errors import ConfigurationError, ModelError
from coli_server.experts import EVICTION_POLICIES, ExpertCache, HistoryError, Reader, UsageHistory, parse_size
from coli_server.ranges import Activations
from coli_server.routing import RoutePolicy
from coli_server.telemetry.histogram import Histogram

F32 = NDArray[np.float32]
STOCK = RoutePolicy(mode="off")

PREFILL_CHUNK = 256
"""Prompt tokens of one step. Large enough that kernels reuse each weight many times from a register tile."""


class Engine:
    """One loaded model. Not thread-safe: one thread makes all calls but those on `text`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        text: Text | None,
        memory: MemoryPlan,
        policy: RoutePolicy,
        end_ids: frozenset[int],
        store: StoreOptions,
        reader: Reader | None = None,
    ) -> None:
        self.folder = checkpoint.folder
        self.spec = checkpoint.spec
        self.policy = policy
        self.memory = memory
        self.end_ids = end_ids
        self.store = store
        self.expert_load, self.expert_wait = Histogram(), Histogram()
        layers = [experts.files for experts in checkpoint.experts]
        self.cache = ExpertCache(
            layers,
            memory.slots_per_layer,
            experts_per_token=self.spec.moe.k,
            readers=store.readers,
            reader=make_reader(store, layers, reader),
            policy=EVICTION_POLICIES[store.evict],
            on_read=self.expert_load.observe,
            on_wait=self.expert_wait.observe,
        )
        self.kinds = checkpoint.weights.kinds
        self._text = text
        try:
            self.model = Model(checkpoint, self.cache, pilot=store.pilot)
            self.usage = self._remember(store.history)
            self.trace = self._record(store.trace)
        except BaseException:
            self.cache.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        ram: str | int | None = "2G",
        experts_per_layer: int | None = None,
        policy: RoutePolicy = STOCK,
        context: int | None = None,
        kv_ram: int | None = None,
        threads: int | None = None,
        activations: Activations = "float32",
        warm: bool = True,
        store: StoreOptions = DEFAULT_STORE,
        reader: Reader | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Load the Hugging Face folder `path`.

        `ram` is the memory of the whole process, in bytes or as `2G` (None: most of what is available);
        `experts_per_layer` limits the expert slots further; `context` is the longest sequence (default: as
        much as the model and the memory allow); `kv_ram` bytes of `ram` are for KV caches (default: a
        quarter at most); `threads` run the kernels; `activations` is what products of
        bfloat16 weights round activations to; `warm` compiles every kernel now instead of at first
        use; `store` says how experts come into memory; `reader` reads the experts' files in place of plain
        preadv(2) and is closed with the engine; `progress` hears how many of how many pins are loaded.

        Raises ModelError for a folder that is broken or not understood, ConfigurationError for a setting
        that cannot work; both name the culprit.
        """
        folder = Path(path)
        kernels.setup(threads if threads is not None else available_threads())
        if activations == "bfloat16":
            kernels.check_bfloat16_dots()
        checkpoint = Checkpoint.open(folder, activations)
        text, end_ids = _text_of(folder, checkpoint)
        memory = plan_memory(
            checkpoint,
            default_ram() if ram is None else parse_size(ram) if isinstance(ram, str) else ram,
            experts_per_layer,
            context,
            PREFILL_CHUNK,
            kv_ram,
            store=store,
        )
        engine = cls(checkpoint, text, memory, policy, end_ids, store, reader)
        try:
            engine._pin(progress)
        except BaseException:
            engine.cache.close()
            raise
        if warm:
            engine.warm()
        return engine

    @property
    def text(self) -> Text:
        """The tokenizer. Raises ModelError for a folder without one."""
        if self._text is None:
            raise ModelError(f"{self.folder} has no tokenizer.json")
        return self._text

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def identity(self) -> str:
        """Which model this is, as far as the choice of experts goes: 64 hexadecimal digits."""
        return identity_of(self.spec, self.model.routed)

    @property
    def model_type(self) -> str:
        return self.spec.model_type

    @property
    def k(self) -> int:
        """Experts that run for a token in a layer."""
        return self.spec.moe.k

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return self.spec.moe.experts

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and generated tokens together."""
        return self.memory.context_length

    @property
    def reuse_limit(self) -> int | None:
        """Length beyond which KV depends on the whole sequence's length and may not be reused; or None."""
        limits = [
            limit
            for layer in self.spec.layers
            if layer.attention.rope is not None
            and (limit := length_threshold(layer.attention.rope)) is not None
        ]
        return min(limits, default=None)

    def warm(self) -> None:
        """Compile every kernel, or load it from the code cache, with this model's types and layouts."""
        warm_kernels(self.spec, self.kinds)
        remember_compiled(self.spec, self.kinds)
        remove_unused_code()

    def new_kv(self, capacity: int) -> KvCache:
        """An empty KV cache for `capacity` tokens."""
        return KvCache(self.model.widths, capacity)

    def new_sequence(self, policy: RoutePolicy, kv: KvCache) -> Sequence:
        """A sequence at the end of `kv`, with the routing state of a new request."""
        spec = self.spec
        return Sequence(
            kv, policy, RouteState.empty(policy, len(spec.moe_layers), spec.moe.experts, spec.moe.k)
        )

    def prompt_chunk(self, policy: RoutePolicy) -> int:
        """How many prompt tokens one step may take: one where each must see its predecessors' choices."""
        return 1 if policy.active and policy.prefill and policy.scope == "session" else PREFILL_CHUNK

    def step(self, spans: Seq[Span]) -> F32:
        """Compute `spans` together; logits float32 [wanted rows, vocab], in span order.

        All or nothing: after an error every sequence is as it was before, but for the reads counted.
        """
        step = Step(spans)
        routes = [span.sequence.route for span in spans]
        for span in spans:
            span.sequence.route = span.sequence.route.copy()
        try:
            logits = self.model.forward(step)
        except BaseException:
            for span, route in zip(spans, routes, strict=True):
                span.sequence.route = route
            step.attribute_loads()
            raise
        step.finish()
        return logits

    def check_ids(self, ids: Seq[int]) -> list[int]:
        """`ids` as a list of Python integers. Raises ConfigurationError naming one outside the vocabulary."""
        checked = [int(i) for i in ids]
        for i in checked:
            if not 0 <= i < self.spec.vocab:
                raise ConfigurationError(
                    f"token id {i} is outside the vocabulary (accepted: 0 to {self.spec.vocab - 1})"
                )
        return checked

    def logits(self, ids: Seq[int]) -> F32:
        """Logits behind every token of the prompt `ids`: float32 [tokens, vocab]."""
        return self._read_prompt(self._start(ids, 0), ids, "all")

    def generate(self, ids: Seq[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Continue `ids` greedily by at most `max_tokens`; stops behind an end token unless `ignore_eos`."""
        sequence = self._start(ids, max_tokens)
        sampler = Sampler(SamplingOptions(), ())
        logits = self._read_prompt(sequence, ids, "last")
        new: list[int] = []
        while len(new) < max_tokens:
            new.append(sampler.choose(logits[-1]))
            if len(new) == max_tokens or (new[-1] in self.end_ids and not ignore_eos):
                break
            logits = self.step([Span(sequence, (new[-1],), prompt=False, length=sequence.position + 1)])
        return new

    def close(self) -> None:
        """Save what was learned, end the read threads and free the expert slots."""
        if self.usage is not None:
            self.usage.save()
        if self.trace is not None:
            self.trace.close()
        self.cache.close()

    def _record(self, file: Path | None) -> RoutingTrace | None:
        if file is None:
            return None
        moe = self.spec.moe
        header = TraceHeader(self.name, self.identity, tuple(self.spec.moe_layers), moe.experts, moe.k)
        trace = RoutingTrace(file, header)
        self.model.observers.append(trace)
        return trace

    def _remember(self, folder: Path | None) -> Usage | None:
        if folder is None:
            return None
        usage = Usage(folder, self.name, self.spec.moe_layers, self.spec.moe.experts, self.identity)
        self.model.observers.append(usage)
        return usage

    def _pin(self, progress: Callable[[int, int], None] | None) -> None:
        """Load the pins that `store.pin` asks for."""
        if self.store.pin == "auto":
            history = None if self.usage is None else self.usage.history
        elif self.store.pin == "off":
            history = None
        else:
            history = UsageHistory(self.spec.moe_layers, self.spec.moe.experts, self.identity)
            try:
                history.load(Path(self.store.pin))
            except HistoryError as error:
                raise ConfigurationError(f"PIN={self.store.pin}: {error}") from None
        if history is not None:
            pin(self.cache, history, self.store.pin_ram, progress)

    def _start(self, ids: Seq[int], max_tokens: int) -> Sequence:
        total = len(self.check_ids(ids)) + max_tokens
        if not 0 < len(ids) <= total <= self.context_length:
            raise ConfigurationError(
                f"{len(ids)} prompt tokens and {max_tokens} new ones: together 1 to {self.context_length} fit"
            )
        return self.new_sequence(self.policy, self.new_kv(total))

    def _read_prompt(self, sequence: Sequence, ids: Seq[int], want: Literal["last", "all"]) -> F32:
        chunk = self.prompt_chunk(sequence.policy)
        rows: list[F32] = []
        for at in range(0, len(ids), chunk):
            part = tuple(int(i) for i in ids[at : at + chunk])
            wanted: Literal["none", "last", "all"] = want
            if want == "last" and at + chunk < len(ids):
                wanted = "none"
            rows.append(self.step([Span(sequence, part, prompt=True, length=len(ids), want=wanted)]))
        return np.concatenate(rows)


def available_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text_of(folder: Path, checkpoint: Checkpoint) -> tuple[Text | None, frozenset[int]]:
    text = Text.load(folder) if (folder / "tokenizer.json").exists() else None
    vocab = checkpoint.spec.vocab
    if text is not None and text.vocab_size > vocab:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: token id {text.vocab_size - 1} does not fit the model's "
            f"vocabulary of {vocab}"
        )
    return text, checkpoint.end_ids
