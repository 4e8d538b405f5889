"""The indexer of sparse attention: what it selects, and that full attention is its limit to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli_server.engine import Engine
from coli_server.engine.sparse import choose
from coli_server.errors import ModelError

MODELS = Path(__file__).parents[1] / "data" / "models"


@settings(deadline=None)  # the first example may compile
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(1, 30)
)
def test_the_best_are_selected_and_ties_go_to_the_earlier(
    seed: int, rows: int, heads: int, topk: int, longest: int
) -> None:
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.integers(0, longest, rows)).astype(np.int32)
    dots = rng.integers(-2, 3, (rows, heads, longest)).astype(np.float32)  # small integers: many ties
    weights = rng.integers(-2, 3, (rows, heads)).astype(np.float32)
    chosen = np.full((rows, topk), -1, np.int32)
    choose(dots, weights, positions, np.float32(0.5), chosen)
    for t, position in enumerate(positions):
        scores = (np.maximum(dots[t, :, : position + 1] * 0.5, 0) * weights[t][:, None]).sum(axis=0)
        best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:topk]
        assert chosen[t].tolist() == sorted(best) + [-1] * (topk - len(best))


def test_as_many_as_there_are_is_full_attention_to_the_bit(tmp_path: Path) -> None:
    prompt = np.load(MODELS / "glm_moe_dsa-sparse" / "expected.npz")["ids_2"].tolist()
    full = _with(tmp_path / "full", index_topk=1000).logits(prompt)
    limit = _with(tmp_path / "limit", index_topk=len(prompt)).logits(prompt)
    fewer = _with(tmp_path / "fewer", index_topk=len(prompt) - 1).logits(prompt)
    np.testing.assert_array_equal(limit, full)
    np.testing.assert_array_equal(fewer[:-1], full[:-1])
    assert (fewer[-1] != full[-1]).any()


def test_shared_layers_have_no_indexer_of_their_own(tmp_path: Path) -> None:
    """The layers are full, shared, full, shared; a layer's tensors and its configured kind must agree."""
    engine = _with(tmp_path)
    assert [width.index for width in engine.model.widths] == [14, 0, 14, 0]
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.indexer.*is missing"):
        _with(tmp_path, indexer_types=["full", "full", "full", "shared"])
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.indexer.* has no place"):
        _with(tmp_path, indexer_types=["full", "shared", "shared", "shared"])


def _with(folder: Path, **changes: object) -> Engine:
    """The sparse fixture with other keys in its config.json."""
    shutil.copytree(MODELS / "glm_moe_dsa-sparse", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return Engine.open(folder, warm=False)
