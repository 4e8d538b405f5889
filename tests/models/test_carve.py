import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.engine import Engine
from coli_server.models.carve.__main__ import make_recipe
from coli_server.models.carve.chat import uncarved
from coli_server.models.carve.cluster import (
    balanced_assignment,
    expert_energy,
    improved_owners,
    initial_owners,
    neuron_energy,
    swiglu,
    top_mask,
)
from coli_server.models.carve.forward import attention, load_layer, rms_norm, rounded
from coli_server.models.carve.layerwise import Settings, carve_layer
from coli_server.models.carve.report import hidden_states, likelihood_and_divergence
from coli_server.models.carve.routed import at_random, by_output_norm, by_router, routed_layer
from coli_server.models.carve.router import Router, fit, lost_energy_gradient, regress, soft_top
from coli_server.models.carve.text import splits
from coli_server.models.checkpoint import write_model
from coli_server.models.dense import bfloat16_bits, bfloat16_values, read_gguf
from coli_server.models.evaluate import with_experts_per_token

TINY = Settings(
    shared=48,
    experts=6,
    experts_per_token=3,
    rounds=2,
    steps=20,
    border=(3, 2),
    caution=0.03,
    logit_range=1e-3,
)


def _random(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(st.integers(0, 2**32 - 1))
def test_groups_are_full_and_no_swap_of_two_helps(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, size=random.integers(2, 5))
    cost = random.standard_normal((sizes.sum(), len(sizes)))
    owners = balanced_assignment(cost, sizes)
    assert np.bincount(owners, minlength=len(sizes)).tolist() == sizes.tolist()
    for i in range(len(cost)):
        for j in range(i):
            now = cost[i, owners[i]] + cost[j, owners[j]]
            assert cost[i, owners[j]] + cost[j, owners[i]] >= now - 1e-6


def test_small_assignments_are_near_the_best_of_all() -> None:
    ratio = []
    for seed in range(30):
        cost = np.random.default_rng(seed).random((6, 3))
        owners = balanced_assignment(cost, np.array([2, 2, 2]))
        best = min(cost[np.arange(6), list(p)].sum() for p in set(permutations([0, 0, 1, 1, 2, 2])))
        ratio.append(cost[np.arange(6), owners].sum() / best)
    assert np.mean(ratio) < 1.02


def test_neuron_energy_is_the_squared_norm_of_what_a_neuron_adds() -> None:
    u, gate, up, down = _random(0, 5, 16), _random(1, 8, 16), _random(2, 8, 16), _random(3, 16, 8)
    energy = neuron_energy(swiglu(u, gate, up), down)
    g = (u @ gate.T).astype(np.float64)
    for neuron in range(8):
        out = (g[:, neuron] / (1 + np.exp(-g[:, neuron])) * (u @ up[neuron]))[:, None] * down[:, neuron]
        np.testing.assert_allclose(energy[:, neuron], np.square(out).sum(axis=1), rtol=1e-4)


def test_neurons_that_work_together_end_in_one_expert() -> None:
    random = np.random.default_rng(0)
    group_of = random.permutation(np.repeat(np.arange(4), 8))
    active = random.random((500, 4)) < 0.4
    energy = (active[:, group_of] * (0.5 + random.random((500, 32)))).astype(np.float32)
    energy = np.concatenate([energy, np.full((500, 8), 9, np.float32)], axis=1)
    owners = initial_owners(energy, shared=8, experts=4)
    assert (owners[32:] == 0).all()
    for group in range(4):
        assert len(set(owners[:32][group_of == group])) == 1


def test_a_neuron_that_is_missed_often_becomes_shared() -> None:
    energy = np.full((100, 12), 0.1, np.float32)
    energy[:, 5] = 3
    kept = top_mask(_random(0, 100, 4), 2)
    owners = improved_owners(energy, kept, shared=4, caution=0.0)
    assert owners[5] == 0
    assert np.bincount(owners).tolist() == [4, 2, 2, 2, 2]


def test_expert_energy_sums_the_owned_neurons() -> None:
    energy = np.abs(_random(0, 3, 6))
    owners = np.array([0, 1, 2, 1, 2, 0])
    np.testing.assert_allclose(
        expert_energy(energy, owners, 2),
        np.stack([energy[:, [1, 3]].sum(1), energy[:, [2, 4]].sum(1)], axis=1),
    )


def test_soft_top_approaches_the_hard_choice() -> None:
    scores = _random(0, 50, 8)
    np.testing.assert_allclose(soft_top(scores, 3, 1e-4).round(), top_mask(scores, 3))


def test_the_gradient_of_lost_energy_is_that_of_an_exactly_balanced_soft_choice() -> None:
    """Against differences of a choice whose border is solved so that exactly k are chosen."""
    k, temperature = 2, 0.3
    scores, energy = _random(1, 5).astype(np.float64), np.abs(_random(2, 5)).astype(np.float64)

    def chosen(z: Any, border: float) -> Any:
        return 1 / (1 + np.exp((border - z) / temperature))

    ordered = np.sort(scores)
    border = (ordered[-k - 1] + ordered[-k]) / 2
    count = chosen(scores, border).sum()

    def lost(z: Any) -> float:
        low, high = z.min() - 20, z.max() + 20
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if chosen(z, middle).sum() > count else (low, middle)
        return float(((1 - chosen(z, low)) * energy).sum())

    numeric = [(lost(scores + 1e-5 * e) - lost(scores - 1e-5 * e)) / 2e-5 for e in np.eye(5)]
    analytic = lost_energy_gradient(
        scores[None].astype(np.float32), energy[None].astype(np.float32), k, temperature
    )
    np.testing.assert_allclose(analytic[0], numeric, atol=1e-4)


def test_the_fitted_router_loses_less_than_regression_and_than_chance() -> None:
    u = _random(0, 4000, 12)
    energy = np.square(np.maximum(u @ _random(1, 6, 12).T, 0)) + 0.01
    start = regress(u, energy)
    fitted = fit(u, energy, start, (3,), steps=200, batch=512)

    def lost(router: Router) -> float:
        return float(((1 - top_mask(router.scores(u), 3)) * energy).sum() / energy.sum())

    assert lost(fitted) < lost(start) < 0.3
    assert lost(Router(_random(2, 6, 12), np.zeros(6, np.float32))) > 0.35


@pytest.fixture
def inputs(tiny: Any) -> tuple[Any, Any, Any]:
    dense = read_gguf(tiny.gguf)
    layer = load_layer(dense, 0)
    return layer, _random(0, 600, 64), np.ones(600, np.float32)


def _carve(u: Any, weight: Any, layer: Any) -> tuple[Any, Any]:
    return carve_layer(u, swiglu(u, layer.gate, layer.up), weight, layer, TINY)


def test_a_carved_layer_with_all_experts_is_the_dense_one(inputs: tuple[Any, Any, Any]) -> None:
    layer, u, weight = inputs
    carved, _ = _carve(u, weight, layer)
    np.testing.assert_allclose(
        carved.output(u, swiglu(u, layer.gate, layer.up), layer, 6), layer.feed_forward(u), atol=1e-5
    )
    assert (
        np.abs(carved.output(u, swiglu(u, layer.gate, layer.up), layer, 3) - layer.feed_forward(u)).max()
        > 1e-3
    )


def test_the_router_lies_between_oracle_and_chance(inputs: tuple[Any, Any, Any]) -> None:
    layer, u, weight = inputs
    _, loss = _carve(u, weight, layer)
    assert 0 < loss.oracle < loss.router < loss.random


def test_router_logits_are_small_and_exact_in_bfloat16(inputs: tuple[Any, Any, Any]) -> None:
    layer, u, weight = inputs
    carved, _ = _carve(u, weight, layer)
    assert 0.9e-3 < np.abs(u @ carved.router.weight.T).max() < 1.1e-3
    np.testing.assert_array_equal(bfloat16_values(bfloat16_bits(carved.router.weight)), carved.router.weight)


def test_a_token_of_no_importance_does_not_count(inputs: tuple[Any, Any, Any]) -> None:
    layer, u, weight = inputs
    wild = u.copy()
    wild[:100] *= 30
    weight[:100] = 1e-12
    carved, _ = _carve(wild, weight, layer)
    plain, _ = _carve(wild, np.ones(600, np.float32), layer)
    assert not np.array_equal(carved.owners, plain.owners)


def test_the_forward_pass_is_the_dense_model_s(tiny: Any, dense_reference: Callable[[Path], Any]) -> None:
    dense = read_gguf(tiny.gguf)
    ids = [5, 77, 200, 3, 9]
    x = rounded(dense, "model.embed_tokens.weight")[[ids]]
    for number in range(dense.config.layers):
        layer = load_layer(dense, number)
        x = x + attention(dense, layer, x)
        x = x + layer.feed_forward(rms_norm(x[0], layer.ffn_norm, dense.config.norm_eps))[None]
    final = rms_norm(x[0], rounded(dense, "model.norm.weight"), dense.config.norm_eps)
    logits = final @ rounded(dense, "model.embed_tokens.weight").T
    np.testing.assert_allclose(logits, dense_reference(tiny.gguf).logits(ids), atol=1e-4)


def test_an_interrupted_run_goes_on_from_the_last_layer(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = read_gguf(tiny.gguf)
    random = np.random.default_rng(0)
    ids = random.integers(len(dense.vocabulary.tokens), size=(12, 20))
    valid = np.ones(ids.shape, dtype=bool)
    valid[3, 10:] = False
    first = make_recipe(dense, ids, valid, TINY, tmp_path)
    (tmp_path / "layer-02.npz").unlink()
    assert capsys.readouterr().err.count("layer") == 3
    again = make_recipe(dense, ids, valid, TINY, tmp_path)
    assert capsys.readouterr().err.count("layer") == 1
    np.testing.assert_array_equal(again.order, first.order)
    np.testing.assert_array_equal(again.router, first.router)
    np.testing.assert_array_equal(again.router_bias, first.router_bias)


def test_calibration_and_evaluation_share_no_document() -> None:
    split = splits()
    assert not set(split["calibration"]) & set(split["evaluation"])
    everything = split["calibration"] + split["evaluation"]
    assert len(everything) == len(set(everything)) == 233 + 135
    addresses = sorted(name for name in everything if name.startswith("sotu/"))
    assert [name for name in split["evaluation"] if name.startswith("sotu/")] == addresses[::25]


def test_the_uncarved_recipe_keeps_every_neuron_in_place(tiny: Any) -> None:
    recipe = uncarved(read_gguf(tiny.gguf).config)
    assert recipe.experts_per_token == recipe.experts == 16
    assert (recipe.order == np.arange(96)).all()
    assert json.dumps(recipe.shared) == "48"


def test_the_report_s_forward_pass_equals_the_engine_s_for_every_k(tiny: Any, tmp_path: Path) -> None:
    dense = read_gguf(tiny.gguf)
    ids = np.random.default_rng(0).integers(len(dense.vocabulary.tokens), size=(2, 9))
    write_model(tmp_path, dense, tiny.recipe, lambda: None)
    head = rounded(dense, "model.embed_tokens.weight")
    for k in (2, 6):
        states = hidden_states(dense, ids, tiny.recipe, k, by_router)
        with with_experts_per_token(tmp_path, k) as variant:
            engine = Engine.open(variant, warm=False)
            for row, state in zip(ids, states, strict=True):
                np.testing.assert_allclose(state @ head.T, engine.logits(row.tolist()), atol=2e-3)
            engine.close()


def test_a_neutral_recipe_s_forward_pass_is_the_dense_one(tiny: Any) -> None:
    dense = read_gguf(tiny.gguf)
    ids = np.random.default_rng(0).integers(len(dense.vocabulary.tokens), size=(1, 9))
    carved = hidden_states(dense, ids, tiny.recipe.neutral(), 6)
    np.testing.assert_allclose(carved, hidden_states(dense, ids), atol=1e-4)


def test_the_oracle_ranks_by_the_norm_of_an_expert_s_output(tiny: Any) -> None:
    dense, recipe = read_gguf(tiny.gguf), tiny.recipe
    routed = routed_layer(dense, recipe, 1)
    u = _random(0, 5, 64)
    activation = swiglu(u, routed.layer.gate, routed.layer.up)
    ranking = by_output_norm(routed, u, activation)
    for expert in range(recipe.experts):
        # What the layer adds with this expert alone, less the same without its neurons.
        alone = np.zeros((5, recipe.experts), np.float32)
        alone[:, expert] = 1
        silent = activation.copy()
        silent[:, recipe.expert_neurons(1, expert)] = 0
        added = routed.output(u, activation, 1, alone) - routed.output(u, silent, 1, alone)
        norm = np.linalg.norm(added, axis=1) / routed.weights(u)[:, expert]
        np.testing.assert_allclose(norm, ranking[:, expert], rtol=1e-3)


def test_divergence_from_itself_is_zero_and_from_others_positive() -> None:
    head, states = _random(0, 20, 8), _random(1, 6, 8)
    ids = np.arange(6)
    nll, same = likelihood_and_divergence(head, ids, states, states)
    assert np.abs(same).max() < 1e-6
    _, other = likelihood_and_divergence(head, ids, states, states + 0.5 * _random(2, 6, 8))
    assert (other > 0).all()
    logits = (states @ head.T).astype(np.float64)
    expected = [np.log(np.exp(logits[t]).sum()) - logits[t, t + 1] for t in range(5)]
    np.testing.assert_allclose(nll, expected, atol=1e-5)


def test_an_oracle_and_chance_pick_other_experts_than_the_router(tiny: Any) -> None:
    dense = read_gguf(tiny.gguf)
    ids = np.random.default_rng(0).integers(len(dense.vocabulary.tokens), size=(1, 12))
    whole = hidden_states(dense, ids)
    error = {
        ranking: np.square(hidden_states(dense, ids, tiny.recipe, 3, ranking) - whole).mean()
        for ranking in (by_output_norm, at_random(0))
    }
    oracle, chance = error.values()
    assert 0 < oracle < chance
