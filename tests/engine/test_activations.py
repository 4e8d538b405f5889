"""Engines whose products round activations. Without the instruction kernels take another way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from coli_server.engine import Engine, kernels
from coli_server.engine.kernels import Kind
from coli_server.engine.moe import MoeBlock
from coli_server.engine.step import STOCK, Span
from coli_server.engine.store import describe_mode
from support.arrays import error, threads
from support.served import MODELS, TINY

IDS = [5, 9, 300, 77, 41, 8] * 6
FAMILIES = ["glm4_moe", "deepseek_v2", "gpt_oss-window"]

REFUSED = """
import sys
from coli_server.engine import Engine
from coli_server.errors import ConfigurationError
try:
    Engine.open(sys.argv[1], activations="bfloat16")
except ConfigurationError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "check_bfloat16_dots", lambda: None)


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = Engine.open(MODELS / request.param, activations="bfloat16", warm=False)
    yield opened
    opened.close()


def test_prompts_at_once_and_token_by_token_have_the_same_bits(engine: Engine) -> None:
    ids = [token % engine.spec.vocab for token in IDS]
    with threads(2):
        together = engine.logits(ids)
    for chunk in (1, 13):
        sequence = engine.new_sequence(STOCK, engine.new_kv(len(ids)))
        parts = [
            engine.step([Span(sequence, tuple(ids[at : at + chunk]), chunk > 1, len(ids), "all")])
            for at in range(0, len(ids), chunk)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def test_rounding_changes_logits_a_little(engine: Engine) -> None:
    ids = [token % engine.spec.vocab for token in IDS]
    exact = Engine.open(engine.folder, warm=False)
    errors = [error(got, want) for got, want in zip(engine.logits(ids), exact.logits(ids), strict=True)]
    assert 0 < np.median(errors) < 0.03  # the largest are those of rows that chose another expert
    exact.close()


def test_all_but_routers_round(engine: Engine) -> None:
    model = engine.model
    for layer in model._layers:
        if isinstance(layer.mlp, MoeBlock):
            assert layer.mlp.router.kind == Kind.BF16
        assert layer.mlp.shape.kind == Kind.BF16_DOT
    assert model._head.kind == Kind.BF16_DOT


def test_the_mode_names_it() -> None:
    assert describe_mode(STOCK, pilot=True, activations="bfloat16") == "stock,pilot,bfloat16-activations"


def test_an_engine_on_a_lesser_processor_refuses() -> None:
    """In place of an abort inside the compiler."""
    ran = subprocess.run(
        [sys.executable, "-c", REFUSED, str(TINY)],
        env={**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse4.2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.startswith("COLI_ACTIVATIONS=bfloat16 needs a processor with AVX512-BF16")
