from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.errors import ModelError
from coli_server.models.dense import bfloat16_bits, bfloat16_values, read_gguf, split_halves


def test_configuration_comes_from_the_metadata(tiny: Any) -> None:
    config = read_gguf(tiny.gguf).config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (3, 64, 4, 2, 16)
    assert (config.ffn, config.context, config.rope_theta, config.norm_eps) == (96, 128, 10_000.0, 1e-5)


def test_rotary_rows_go_back_to_two_halves() -> None:
    heads, head_dim, hidden = 3, 8, 5
    halves = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    interleaved = np.empty_like(halves)
    for head in range(heads):
        for i in range(head_dim // 2):
            first, second = head * head_dim + i, head * head_dim + head_dim // 2 + i
            interleaved[head * head_dim + 2 * i] = halves[first]
            interleaved[head * head_dim + 2 * i + 1] = halves[second]
    np.testing.assert_array_equal(split_halves(interleaved, heads), halves)


def test_values_are_the_dequantised_ones(tiny: Any, dense_reference: Callable[[Path], Any]) -> None:
    weights = dense_reference(tiny.gguf).weights
    dense = read_gguf(tiny.gguf)
    rounded = bfloat16_values(bfloat16_bits(dense.tensor("model.layers.1.mlp.down_proj.weight")))
    np.testing.assert_array_equal(rounded, weights["blk.1.ffn_down.weight"])


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (-0.0, -0.0),
        (1 + 2**-8, 1.0),  # a tie goes to the even neighbour, below
        (1 + 3 * 2**-8, 1 + 2**-6),  # and above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (float(np.float32(2**-126)), 2**-126),
        (1.9999, 2.0),  # the carry reaches the exponent
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, rounded: float) -> None:
    result = bfloat16_values(bfloat16_bits(np.array([value], np.float32)))
    assert result[0] == rounded
    assert np.signbit(result[0]) == np.signbit(value)


def test_a_missing_tensor_is_named(tiny: Any) -> None:
    with pytest.raises(ModelError, match=r"blk\.9\.ffn_up\.weight"):
        read_gguf(tiny.gguf).tensor("model.layers.9.mlp.up_proj.weight")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"GGUX" * 100)
    with pytest.raises(ModelError, match=r"not\.gguf"):
        read_gguf(path)


def test_another_architecture_is_refused(tmp_path: Path, write_gguf: Callable[..., None]) -> None:
    path = tmp_path / "falcon.gguf"
    write_gguf(path, architecture="falcon")
    with pytest.raises(ModelError, match=r"general\.architecture is 'falcon'"):
        read_gguf(path)
