"""Feed-forward blocks: those that stay in memory, and routed experts that come through the expert cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.expert_files import expert_shape
from coli_server.engine.families.common import TensorNames
from coli_server.engine.grouping import group_pairs, take_groups, tally
from coli_server.engine.kernels import ExpertShape
from coli_server.engine.routers import score
from coli_server.engine.spec import DenseMlp, MoeMlp
from coli_server.engine.step import RowGroup, Step
from coli_server.engine.use import RouteUse
from coli_server.engine.weights import Matrix, Weights
from coli_server.engine.workspace import Workspace
from coli_server.experts import ExpertCache
from coli_server.routing import Selection, select

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ResidentMlp:
    """A feed-forward block that stays in memory: a dense layer or a shared expert."""

    data: NDArray[np.uint16] | F32  # gate [width, hidden], up [width, hidden], down [hidden, width], flat
    shape: ExpertShape
    gate: Matrix | None  # a shared expert's own gate, [1, hidden]

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
        size = spec.width * hidden * data.itemsize
        return cls(
            data, expert_shape(kind, hidden, spec.width, spec.activation, (0, size, 2 * size)), own_gate
        )

    def forward(self, x: F32, workspace: Workspace) -> F32:
        """float32 [rows, hidden] -> [rows, hidden]."""
        rows = np.arange(len(x), dtype=np.int32)
        out = np.empty_like(x)
        kernels.experts_ffn(
            x,
            rows,
            np.array([0, len(x)], np.int32),
            np.array([self.data.ctypes.data], np.int64),
            self.shape,
            workspace.take("ffn_hidden", (len(x), self.shape.f)),
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
    use: RouteUse

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
        use: RouteUse,
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
                DenseMlp(spec.shared.width, spec.activation),
                prefix + names.shared_gate if spec.shared.gated else None,
            )
        return cls(
            spec,
            layer,
            slot,
            weights.matrix([prefix + names.router], [spec.experts], hidden, bias=spec.router.bias),
            weights.vector(prefix + names.correction_bias, spec.experts)
            if spec.router.correction_bias
            else None,
            shared,
            shape,
            cache,
            use,
        )

    def forward(self, x: F32, step: Step, workspace: Workspace) -> F32:
        """float32 [rows, hidden] -> [rows, hidden]."""
        chosen, weights = self._route(x, step)
        out = np.zeros_like(x) if self.shared is None else self.shared.forward(x, workspace)
        outputs = self._run(x, chosen, step, workspace)
        return kernels.combine(outputs, weights, out)

    def _route(self, x: F32, step: Step) -> tuple[I32, F32]:
        """The experts of every row in rank order, int32 [rows, k], and their weights, float32 [rows, k]."""
        logits = self.router(x)
        scores, mass = score(self.spec.router, logits, self.correction)
        if len(step.groups) == 1:
            selection = self._select(step.groups[0], scores, mass, logits, step)
            return selection.experts, selection.weights
        chosen = np.empty((len(x), self.spec.k), np.int32)
        weights = np.empty((len(x), self.spec.k), np.float32)
        for group in step.groups:
            selection = self._select(group, scores[group.rows], mass[group.rows], logits[group.rows], step)
            chosen[group.rows], weights[group.rows] = selection.experts, selection.weights
        return chosen, weights

    def _select(self, group: RowGroup, scores: F32, mass: F32, logits: F32, step: Step) -> Selection:
        router = self.spec.router
        ranked = logits if router.scoring == "softmax" else None  # sigmoid families rank by score
        selection = select(
            scores,
            mass,
            group.residency(self.slot, self.cache.resident(self.layer)),
            self.spec.k,
            group.policy,
            logits=ranked,
            span=group.spans(self.slot, scores, ranked),
            renormalize=router.renormalize,
            scale=router.scale,
        )
        group.touch(self.slot, selection.experts)
        step.record(group, selection)
        if group.counted is not None:
            self.use.track(self.slot, selection.experts[group.counted], selection.true[group.counted])
        return selection

    def _run(self, x: F32, chosen: I32, step: Step, workspace: Workspace) -> F32:
        """The output of every chosen expert, unweighted: float32 [rows * k, hidden]."""
        k, rows = self.spec.k, len(x)
        tally(self.cache.state(self.layer), chosen, step.found)
        order, starts, wanted = group_pairs(chosen, self.spec.experts)
        outputs = workspace.take("expert_outputs", (rows * k, x.shape[1]))
        stream = self.cache.stream(self.layer, wanted)
        try:
            for lease in stream:
                group_start, tokens, pairs = take_groups(order, starts, lease.experts, k)
                kernels.experts_ffn(
                    x, tokens, group_start, lease.addresses, self.shape,
                    workspace.take("ffn_hidden", (len(pairs), self.shape.f)), outputs, pairs,
                )  # fmt: skip
        finally:  # what was read was read, also when something else could not be
            stream.close()
            for expert, nbytes in stream.loads:
                step.loads[order[starts[expert]] // k] += (1, nbytes)
        return outputs
