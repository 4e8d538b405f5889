"""Feed-forward blocks: those that stay in memory, and routed experts that come through the expert cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.expert_files import expert_shape
from coli_server.engine.families.common import TensorNames
from coli_server.engine.grouping import group_pairs, take_groups
from coli_server.engine.kernels import ExpertShape, row_bytes
from coli_server.engine.routers import score
from coli_server.engine.spec import DenseMlp, MoeMlp
from coli_server.engine.step import RowGroup, Step
from coli_server.engine.weights import Matrix, Weights
from coli_server.engine.workspace import Workspace
from coli_server.experts import ExpertCache, ExpertStream
from coli_server.routing import Selection, select

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class RouteObserver(Protocol):
    """Follows what routing does. It must not keep or change what the choices depend on."""

    def observe(self, slot: int, group: RowGroup, selection: Selection, scores: F32, /) -> None:
        """The rows of `group` were routed in the MoE layer `slot`; `selection` has their choices.

        `scores`, float32 [rows, experts], is what the router ranked by.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResidentMlp:
    """A feed-forward block that stays in memory: a dense layer or a shared expert."""

    data: NDArray[Any]  # gate [width, hidden], up [width, hidden], down [hidden, width], flat; biases
    shape: ExpertShape
    gate: Matrix | None  # a shared expert's own gate, [1, hidden]
    address: I64 = field(init=False)  # [1]: where `data` begins

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", np.array([self.data.ctypes.data], np.int64))

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: tuple[str, str, str],
        hidden: int,
        spec: DenseMlp,
        gate: str | None = None,
    ) -> ResidentMlp:
        """Read the block whose three matrices have the hub names `names`, without `.weight`."""
        up, down = (spec.width, hidden), (hidden, spec.width)
        data, kind = weights.packed([f"{name}.weight" for name in names], [up, up, down])
        own_gate = None if gate is None else weights.matrix([gate], [1], hidden)
        size = spec.width * row_bytes(kind, hidden)
        shape = expert_shape(
            weights.multiplied(kind), hidden, spec.width, spec.activation, (0, size, 2 * size)
        )
        if spec.bias:
            end = data.nbytes
            at = end + -end % 4  # float32, behind the matrices
            widths = (spec.width, spec.width, hidden)
            biases = [weights.vector(f"{name}.bias", n) for name, n in zip(names, widths, strict=True)]
            gap = np.zeros((at - end) // data.itemsize, data.dtype)
            data = np.concatenate([data, gap, np.concatenate(biases).view(data.dtype)])
            up_bias = at + 4 * spec.width
            shape = replace(shape, gate_bias=at, up_bias=up_bias, down_bias=up_bias + 4 * spec.width)
        return cls(data, shape, own_gate)

    def forward(self, x: F32, workspace: Workspace) -> F32:
        """float32 [rows, hidden] -> [rows, hidden]."""
        rows, starts = workspace.all_rows(len(x))
        out = np.empty_like(x)
        kernels.experts_ffn(
            x,
            rows,
            starts,
            self.address,
            self.shape,
            workspace.take("ffn_hidden", (len(x), self.shape.hidden)),
            out,
            rows,
        )
        if self.gate is not None:
            out *= 1.0 / (1.0 + np.exp(-self.gate(x)))
        return out


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """One layer's router, shared expert and routed experts.

    `layer` is the model's number of the layer, `slot` its place among the MoE layers.
    """

    spec: MoeMlp
    layer: int
    slot: int
    router: Matrix
    correction: F32 | None
    shared: ResidentMlp | None
    shape: ExpertShape
    cache: ExpertCache
    observers: Sequence[RouteObserver]

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: TensorNames,
        spec: MoeMlp,
        layer: int,
        hidden: int,
        shape: ExpertShape,
        slot: int,
        cache: ExpertCache,
        observers: Sequence[RouteObserver],
    ) -> MoeBlock:
        """Read router and shared expert of `layer`; the routed experts stay where they are."""
        prefix = names.layer.format(layer=layer)
        shared = None
        if spec.shared is not None:
            gate, up, down = names.shared
            shared = ResidentMlp.load(
                weights,
                (prefix + gate, prefix + up, prefix + down),
                hidden,
                DenseMlp(spec.shared.width, spec.activation, spec.shared.bias),
                prefix + names.shared_gate if spec.shared.gated else None,
            )
        return cls(
            spec,
            layer,
            slot,
            weights.matrix(
                [prefix + names.router], [spec.experts], hidden, bias=spec.router.bias, exact=True
            ),
            weights.vector(prefix + names.correction_bias, spec.experts)
            if spec.router.correction_bias
            else None,
            shared,
            shape,
            cache,
            observers,
        )

    def forward(
        self, x: F32, step: Step, workspace: Workspace, ahead: Callable[[F32], None] | None = None
    ) -> F32:
        """float32 [rows, hidden] -> [rows, hidden].

        The reads of missing experts begin before the shared expert is computed. `ahead` is called between
        them and the routed experts, with the shared expert's output (or zeros), which it must not change.
        """
        self.cache.poll()
        chosen, weights = self._route(x, step)
        order, starts, wanted = group_pairs(chosen, self.cache.state(self.layer), step.found)
        stream = self.cache.stream(self.layer, wanted)
        try:
            out = np.zeros_like(x) if self.shared is None else self.shared.forward(x, workspace)
            if ahead is not None:
                ahead(out)
            outputs = self._run(x, stream, order, starts, workspace)
        finally:  # what was read was read, also when something else could not be
            stream.close()
            for expert, nbytes in stream.loads:
                step.loads[order[starts[expert]] // self.spec.k] += (1, nbytes)
        return kernels.combine(outputs, weights, out)

    def guess(self, x: F32, step: Step, margin: int) -> list[I32]:
        """What this layer would choose for `x`: int32 [rows, k] in rank order for each policy of the step.

        Nothing is recorded. Under the stock router the rows have the `margin` next experts too.
        Raises ScoreError where the router's scores are not finite.
        """
        scores, mass, logits = self._score(x)
        guessed = []
        for group in step.groups:
            k = self.spec.k if group.policy.active else min(self.spec.k + margin, self.spec.experts)
            rows = group.rows
            guessed.append(self._choose(group, scores[rows], mass[rows], logits[rows], None, k).experts)
        return guessed

    def _route(self, x: F32, step: Step) -> tuple[I32, F32]:
        """The experts of every row in rank order, int32 [rows, k], and their weights, float32 [rows, k]."""
        scores, mass, logits = self._score(x)
        if len(step.groups) == 1:
            selection = self._select(step.groups[0], scores, mass, logits, step)
            return selection.experts, selection.weights
        chosen = np.empty((len(x), self.spec.k), np.int32)
        weights = np.empty((len(x), self.spec.k), np.float32)
        for group in step.groups:
            selection = self._select(group, scores[group.rows], mass[group.rows], logits[group.rows], step)
            chosen[group.rows], weights[group.rows] = selection.experts, selection.weights
        return chosen, weights

    def _score(self, x: F32) -> tuple[F32, F32, F32]:
        """Ranking scores, gate masses and router logits, each float32 [rows, experts]."""
        logits = self.router(x)
        scores, mass = score(self.spec.router, logits, self.correction)
        return scores, mass, logits

    def _select(self, group: RowGroup, scores: F32, mass: F32, logits: F32, step: Step) -> Selection:
        """Choose, and let everybody who follows choices know."""
        span = group.spans(self.slot, scores, self._ranked(logits))
        selection = self._choose(group, scores, mass, logits, span, self.spec.k)
        group.touch(self.slot, selection.experts)
        step.record(group, selection)
        for observer in self.observers:
            observer.observe(self.slot, group, selection, scores)
        return selection

    def _choose(
        self, group: RowGroup, scores: F32, mass: F32, logits: F32, span: NDArray[np.float64] | None, k: int
    ) -> Selection:
        router = self.spec.router
        return select(
            scores,
            mass,
            group.residency(self.slot, self.cache.resident(self.layer)),
            k,
            group.policy,
            logits=self._ranked(logits),
            span=span,
            renormalize=router.renormalize,
            scale=router.scale,
        )

    def _ranked(self, logits: F32) -> F32 | None:
        """What cache-prior adds its bonus to: the logits of softmax families; others rank by score."""
        return logits if self.spec.router.scoring == "softmax" else None

    def _run(self, x: F32, stream: ExpertStream, order: I32, starts: I32, workspace: Workspace) -> F32:
        """The output of every chosen expert, unweighted: float32 [rows * k, hidden]."""
        k = self.spec.k
        outputs = workspace.take("expert_outputs", (len(x) * k, x.shape[1]))
        for lease in stream:
            group_start, tokens, pairs = take_groups(order, starts, lease.experts, k)
            kernels.experts_ffn(
                x, tokens, group_start, lease.addresses, self.shape,
                workspace.take("ffn_hidden", (len(pairs), self.shape.hidden)), outputs, pairs,
            )  # fmt: skip
        return outputs
