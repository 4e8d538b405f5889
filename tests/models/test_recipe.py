import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.errors import ModelError
from coli_server.models import DEFAULT_MODEL
from coli_server.models.recipe import Recipe, dump_recipe, load_recipe, read_recipe


def _saved(path: Path, recipe: Recipe) -> str:
    path.write_bytes(dump_recipe(recipe))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_recipe_comes_back_as_it_was_written(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe"
    loaded = load_recipe(path, _saved(path, tiny.recipe))
    for field in dataclasses.fields(Recipe):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(tiny.recipe, field.name))


def test_one_changed_byte_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe"
    sha256 = _saved(path, tiny.recipe)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="sha256"):
        load_recipe(path, sha256)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe"
    path.write_bytes(b"hello")
    with pytest.raises(ModelError, match="not a recipe"):
        load_recipe(path, hashlib.sha256(b"hello").hexdigest())


def test_another_format_is_named(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe"
    path.write_bytes(dump_recipe(tiny.recipe).replace(b"coli-carving-3", b"coli-carving-9"))
    with pytest.raises(ModelError, match="format is 'coli-carving-9', must be 'coli-carving-3'"):
        read_recipe(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent: not a recipe"):
        read_recipe(tmp_path / "absent")


def test_every_neuron_has_exactly_one_place(tiny: Any) -> None:
    recipe = tiny.recipe
    for layer in range(recipe.layers):
        places = [recipe.shared_neurons(layer)]
        places += [recipe.expert_neurons(layer, expert) for expert in range(recipe.experts)]
        assert sorted(np.concatenate(places)) == list(range(96))


def test_a_neuron_has_the_scales_of_its_owner(tiny: Any) -> None:
    recipe = tiny.recipe
    for layer in range(recipe.layers):
        scale = recipe.neuron_scale(layer)
        owners = [recipe.shared_neurons(layer)]
        owners += [recipe.expert_neurons(layer, expert) for expert in range(recipe.experts)]
        for neurons, channels in zip(owners, recipe.scale[layer], strict=True):
            assert (scale[:, neurons] == channels[:, None]).all()


def test_a_neutral_recipe_moves_no_neuron_and_weighs_everything_alike(tiny: Any) -> None:
    neutral = tiny.recipe.neutral()
    np.testing.assert_array_equal(neutral.order, tiny.recipe.order)
    assert neutral.experts_per_token == neutral.experts == 6
    assert not neutral.router.any()
    assert not neutral.router_bias.any()
    assert (neutral.scale == 1).all()


def _twice(recipe: Recipe) -> Recipe:
    order = recipe.order.copy()
    order[1, 0] = order[1, 1]
    return dataclasses.replace(recipe, order=order)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_twice, "not a permutation"),
        (lambda r: dataclasses.replace(r, shared=47), "do not split"),
        (lambda r: dataclasses.replace(r, shared=96), "do not split"),
        (lambda r: dataclasses.replace(r, experts_per_token=7), "must be 1 to 6"),
        (lambda r: dataclasses.replace(r, router_bias=r.router_bias[:, :5]), "biases"),
        (lambda r: dataclasses.replace(r, router_bias=r.router_bias * np.inf), "not a number"),
        (
            lambda r: dataclasses.replace(r, scale=r.scale[:, :6]),
            r"scales \(3, 6, 64\), must be \(3, 7, 64\)",
        ),
        (lambda r: dataclasses.replace(r, scale=r.scale - 2), "not a positive number"),
        (lambda r: dataclasses.replace(r, scale=r.scale * np.nan), "not a positive number"),
    ],
)
def test_an_impossible_recipe_is_refused(tiny: Any, broken: Callable[[Recipe], Recipe], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        broken(tiny.recipe)


def test_the_shipped_recipe_routes_a_third_of_the_neurons() -> None:
    recipe = load_recipe(DEFAULT_MODEL.recipe, DEFAULT_MODEL.recipe_sha256)
    assert (recipe.layers, recipe.experts, recipe.experts_per_token) == (30, 16, 8)
    assert recipe.experts * recipe.expert_width * 3 >= recipe.order.shape[1]
    assert DEFAULT_MODEL.recipe.stat().st_size < 1_500_000
