"""Calibration text of the instruct kind: the dense model's own greedy answers to prompts of ours."""

import json
import tempfile
from pathlib import Path

import numpy as np

from coli_server.engine import Engine
from coli_server.models.carve.prompts import prompts
from coli_server.models.checkpoint import write_model
from coli_server.models.dense import DenseConfig, DenseModel
from coli_server.models.recipe import Recipe

EXPERTS = 16
ANSWER_TOKENS = 256


def dialogues(dense: DenseModel, file: Path) -> list[list[int]]:
    """Token ids of prompt and answer, one dialogue a prompt; kept in `file`, a JSON list of lists."""
    if not file.exists():
        file.write_text(json.dumps(_generate(dense)))
    rows: list[list[int]] = json.loads(file.read_text())
    return rows


def _generate(dense: DenseModel) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), dense, uncarved(dense.config), lambda: None)
        engine = Engine.open(folder)
        asked = [engine.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts()]
        rows = [[*ids, *engine.generate(ids, ANSWER_TOKENS), dense.vocabulary.eos] for ids in asked]
        engine.close()
        return rows


def uncarved(config: DenseConfig) -> Recipe:
    """A recipe with every expert active, so that the carved model is the dense one."""
    return Recipe(
        shared=config.ffn // 2,
        experts_per_token=EXPERTS,
        order=np.tile(np.arange(config.ffn, dtype=np.uint16), (config.layers, 1)),
        router=np.zeros((config.layers, EXPERTS, config.hidden), dtype=np.uint16),
        router_bias=np.zeros((config.layers, EXPERTS), dtype=np.float32),
        scale=np.ones((config.layers, 1 + EXPERTS, config.hidden), dtype=np.float16),
    )
