"""After `Engine.warm` no request waits for a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "data" / "models"

PROGRAM = """
import sys
from numba.core.dispatcher import Dispatcher
from coli_server.engine import Engine, kernels

def compiled():
    return {
        (name, function.__name__): len(function.signatures)
        for name, module in list(sys.modules.items()) if name.startswith("coli_server")
        for function in vars(module).values() if isinstance(function, Dispatcher)
    }

kernels.check_bfloat16_dots = lambda: None  # without the instruction kernels take another way
engine = Engine.open(sys.argv[1], warm=False, activations=sys.argv[2])
engine.warm()
warm = compiled()
engine.generate(list(range(2, 42)), 3, ignore_eos=True)
late = sorted(set(compiled().items()) - set(warm.items()))
engine.close()
sys.exit(f"compiled late: {late}" if late else 0)
"""


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("deepseek_v2-greedy", "float32"),
        ("deepseek_v2-greedy", "bfloat16"),
        ("glm4_moe", "float32"),
        ("glm_moe_dsa-sparse", "float32"),
        ("gpt_oss-mxfp4", "float32"),
        ("gpt_oss-window", "float32"),
    ],
)
def test_nothing_is_compiled_late(name: str, activations: str) -> None:
    words = [str(MODELS / name), activations]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
