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
from coli_server.engine import Engine

def compiled():
    return {
        (name, function.__name__): len(function.signatures)
        for name, module in list(sys.modules.items()) if name.startswith("coli_server")
        for function in vars(module).values() if isinstance(function, Dispatcher)
    }

engine = Engine.open(sys.argv[1], warm=False)
engine.warm()
warm = compiled()
engine.generate(list(range(2, 42)), 3, ignore_eos=True)
late = sorted(set(compiled().items()) - set(warm.items()))
engine.close()
sys.exit(f"compiled late: {late}" if late else 0)
"""


@pytest.mark.parametrize(
    "name", ["deepseek_v2-greedy", "glm4_moe", "glm_moe_dsa-sparse", "gpt_oss-mxfp4", "gpt_oss-window"]
)
def test_nothing_is_compiled_late(name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(MODELS / name)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
