"""Experts straight from their slots: against float64, in every layout, the same bits however grouped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from coli_server.engine.kernels import (
    ACTIVATION_CLAMPED_SWIGLU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_SILU,
    ITEM_BYTES,
    ExpertShape,
    Kind,
    experts_ffn,
)
from support.arrays import Array, error, guarded, normal, rounded, stored, threads, widened

ALPHA, LIMIT = 1.702, 1.5


@dataclass(frozen=True)
class Experts:
    """`count` experts with float64 copies of their weights."""

    shape: ExpertShape
    slots: list[Array]
    gates: list[Array]
    ups: list[Array]
    downs: list[Array]
    biases: list[tuple[Array, Array, Array]] | None

    def reference(self, e: int, x: Array) -> Array:
        """float64 [d] from float32 [d]."""
        g, u = self.gates[e] @ x.astype(np.float64), self.ups[e] @ x.astype(np.float64)
        if self.biases is not None:
            g, u = g + self.biases[e][0], u + self.biases[e][1]
        if self.shape.activation == ACTIVATION_SILU:
            h = g / (1 + np.exp(-g)) * u
        elif self.shape.activation == ACTIVATION_CLAMPED_SWIGLU:
            g, u = np.minimum(g, LIMIT), np.clip(u, -LIMIT, LIMIT)
            h = (u + 1) * g / (1 + np.exp(-ALPHA * g))
        else:
            h = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        y = self.downs[e] @ h
        return y if self.biases is None else y + self.biases[e][2]


def make(
    d: int, f: int, kind: int = Kind.BF16, activation: int = ACTIVATION_SILU, count: int = 5,
    interleaved: bool = False, biased: bool = False,
) -> Experts:  # fmt: skip
    """Experts with gate, up, down one after the other, or rows of gate and up in turns; then biases."""
    rng = np.random.default_rng(d + f)
    row, size = d * ITEM_BYTES[kind], d * f * ITEM_BYTES[kind]
    bias = 3 * size + -3 * size % 4
    shape = ExpertShape(
        kind, d, f, gate_offset=0, up_offset=row if interleaved else size, down_offset=2 * size,
        gate_stride=2 * row if interleaved else 0, up_stride=2 * row if interleaved else 0,
        gate_bias=bias if biased else -1, up_bias=bias + 4 if biased else -1,
        down_bias=bias + 8 * f if biased else -1, gate_bias_stride=2, up_bias_stride=2,
        activation=activation, alpha=ALPHA, limit=LIMIT,
    )  # fmt: skip
    made = Experts(shape, [], [], [], [], [] if biased else None)
    for _ in range(count):
        gate, up, down = (
            stored(normal(rng, *size) / np.float32(np.sqrt(size[1])), kind)
            for size in ((f, d), (f, d), (d, f))
        )
        both = np.stack([gate, up], 1) if interleaved else np.stack([gate, up])
        tail = [normal(rng, f), normal(rng, f), normal(rng, d)]
        bias_bytes = [
            np.zeros(bias - 3 * size, np.uint8),
            np.stack(tail[:2], 1).view(np.uint8),
            tail[2].view(np.uint8),
        ]
        parts = [both.view(np.uint8), down.view(np.uint8), *(bias_bytes if biased else [])]
        made.slots.append(np.concatenate([part.ravel() for part in parts]))
        made.gates.append(widened(gate, kind))
        made.ups.append(widened(up, kind))
        made.downs.append(widened(down, kind))
        if made.biases is not None:
            made.biases.append((tail[0], tail[1], tail[2]))
    return made


def run(made: Experts, x: Array, chosen: Array, addresses: list[int] | None = None) -> Array:
    """The outputs of `chosen` int [tokens, k], float32 [tokens * k, d], by one call."""
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    ids, start = np.unique(flat[order], return_index=True)
    every = [slot.ctypes.data for slot in made.slots] if addresses is None else addresses
    y = np.full((flat.size, made.shape.d), np.nan, np.float32)
    return experts_ffn(
        x,
        (order // chosen.shape[1]).astype(np.int32),
        np.append(start, flat.size).astype(np.int32),
        np.array(every, np.int64)[ids],
        made.shape,
        np.empty((flat.size, made.shape.hidden), np.float32),
        y,
        order.astype(np.int32),
    )


def choose(tokens: int, k: int, count: int = 5) -> Array:
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(count)[:k] for _ in range(tokens)])


def wanted(made: Experts, x: Array, chosen: Array) -> Array:
    return np.stack([made.reference(e, x[t]) for t, row in enumerate(chosen) for e in row])


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F16, Kind.F32])
@pytest.mark.parametrize(("d", "f"), [(1, 1), (6, 5), (64, 16), (33, 20), (130, 71)])
@pytest.mark.parametrize(("tokens", "k"), [(1, 5), (2, 2), (17, 3)])
def test_matches_float64(d: int, f: int, tokens: int, k: int, kind: int) -> None:
    made, x, chosen = make(d, f, kind), normal(np.random.default_rng(d), tokens, d), choose(tokens, k)
    assert error(run(made, x, chosen), wanted(made, x, chosen)) < 2e-6


@pytest.mark.parametrize(("d", "f"), [(1, 1), (6, 5), (64, 16), (33, 20), (130, 71)])
@pytest.mark.parametrize(("tokens", "k"), [(1, 5), (17, 3)])
def test_rounded_activations_match_float64(d: int, f: int, tokens: int, k: int) -> None:
    """Within what rounding costs: of the input and of what is between the products."""
    made, x, chosen = (
        make(d, f, Kind.BF16_DOT),
        normal(np.random.default_rng(d), tokens, d),
        choose(tokens, k),
    )
    assert error(run(made, x, chosen), wanted(made, rounded(x), chosen)) < 2.0**-8


@pytest.mark.parametrize("activation", [ACTIVATION_SILU, ACTIVATION_CLAMPED_SWIGLU, ACTIVATION_GELU_TANH])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_layouts_and_activations(activation: int, interleaved: bool, biased: bool, tokens: int) -> None:
    made = make(34, 22, activation=activation, interleaved=interleaved, biased=biased)
    x, chosen = normal(np.random.default_rng(1), tokens, 34) * 2, choose(tokens, 3)
    assert error(run(made, x, chosen), wanted(made, x, chosen)) < 2e-6


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.BF16_DOT])
def test_bits_do_not_depend_on_groups_tokens_or_threads(kind: Kind) -> None:
    made, x, chosen = make(100, 70, kind), normal(np.random.default_rng(2), 40, 100), choose(40, 3)
    with threads(1):
        alone = np.concatenate([run(made, x[t : t + 1], chosen[t : t + 1]) for t in range(40)])
        for tokens in (2, 5, 13, 40):
            np.testing.assert_array_equal(run(made, x[:tokens], chosen[:tokens]), alone[: 3 * tokens])
    with threads(2):
        np.testing.assert_array_equal(run(made, x, chosen), alone)
        np.testing.assert_array_equal(run(made, x[:1], chosen[:1]), alone[:3])


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F32, Kind.BF16_DOT])
def test_nothing_beyond_a_slot_is_touched(tokens: int, kind: int) -> None:
    made, x = make(35, 21, kind, count=1), normal(np.random.default_rng(3), tokens, 35)
    chosen = np.zeros((tokens, 1), np.int64)
    with guarded(made.slots[0]) as slot, guarded(x) as gx:
        np.testing.assert_array_equal(run(made, gx, chosen, [slot.ctypes.data]), run(made, x, chosen))


def test_no_group_is_no_work() -> None:
    made, empty = make(8, 8), np.zeros(0, np.int32)
    y = np.full((1, 8), 7, np.float32)
    none = np.zeros((0, made.shape.hidden), np.float32)
    experts_ffn(y, empty, np.zeros(1, np.int32), np.zeros(0, np.int64), made.shape, none, y, empty)
    assert (y == 7).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    made, x, chosen = make(8, 8), np.zeros((1, 9), np.float32), choose(1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        run(made, x, chosen)
    with pytest.raises(ValueError, match="no kernel"):
        ExpertShape(99, 8, 8, 0, 1, 2)
