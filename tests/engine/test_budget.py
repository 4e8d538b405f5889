"""The memory budget is a promise for the whole process, from its first moment on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine import Engine, memory
from coli_server.engine.memory import default_ram, plan_memory
from coli_server.engine.model import Checkpoint
from coli_server.errors import ConfigurationError
from coli_server.experts import available_memory, parse_size
from support.served import TINY

MIB = 1 << 20

# A process of its own: opens the model, touches every slot, fills the KV caches, tells its high-water mark.
PROGRAM = """
import json, sys
from coli_server.engine import Engine
from coli_server.engine.store import StoreOptions
engine = Engine.open(sys.argv[1], ram=sys.argv[2], store=StoreOptions(direct=True, pilot=True))
prompt = min(560, engine.context_length - 30)
rest = engine.new_kv(engine.memory.kv_bytes // engine.memory.kv_token_bytes - prompt - 30)
for array in rest.keys + rest.values:
    array.fill(1.0)
engine.generate([i * 37 % 500 for i in range(prompt)], 30, ignore_eos=True)
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
plan = engine.memory
print(json.dumps({"peak": peak, "ram": plan.ram, "slots": plan.slots_per_layer, "used": engine.cache.bytes}))
engine.close()
"""


def make_model(folder: Path) -> Path:
    """An olmoe of random weights: 130 MB of experts in 4 layers of 64, 20 MB of the rest."""
    hidden, width, layers, experts, vocab, heads = 256, 320, 4, 64, 20_000, 8
    config = json.loads((TINY.parent / "olmoe" / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config.pop("head_dim", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{base}{name}.weight"] = (hidden,)
        for name in "qkvo":
            shapes[f"{base}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{base}mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for part, shape in (
                ("gate", (width, hidden)),
                ("up", (width, hidden)),
                ("down", (hidden, width)),
            ):
                shapes[f"{base}mlp.experts.{expert}.{part}_proj.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    values = np.random.default_rng(5).normal(0, 0.05, at // 2).astype(np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        (values.view(np.uint32) >> 16).astype(np.uint16).tofile(file)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("budget") / "model")


def run(model: Path, ram: str, code_cache: Path | None = None) -> dict[str, int]:
    environment = dict(os.environ)
    if code_cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(code_cache)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), ram], env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def least(model: Path, code_cache: Path | None = None) -> str:
    """The smallest budget that works, as the refusal of a smaller one names it."""
    environment = dict(os.environ)
    if code_cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(code_cache)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), "40M"], env=environment, capture_output=True, text=True
    )
    match = re.search(
        r"--ram=40M is too small for this model: the least that works is --ram=(\d+M)", done.stderr
    )
    assert match, done.stderr
    return match[1]


def check(found: dict[str, int]) -> None:
    assert found["peak"] <= 1.05 * found["ram"], f"{found['peak'] / MIB:.0f} of {found['ram'] / MIB:.0f} MiB"
    assert found["used"] > 0


def test_a_process_that_compiles_its_kernels_keeps_the_smallest_budget_that_works(
    model: Path, tmp_path: Path
) -> None:
    check(run(model, least(model, tmp_path), tmp_path))  # nothing is in this code cache yet


def test_with_compiled_kernels_a_smaller_budget_works_and_is_kept(model: Path) -> None:
    run(model, "1G")
    found = run(model, least(model))
    check(found)
    assert found["slots"] >= 8
    assert parse_size(least(model)) < parse_size("400M")


def test_a_short_budget_is_shared_between_context_and_experts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that could not hold a quarter for KV got the shortest context and all the rest as experts."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: 100 * MIB)  # the tests' process grows and shrinks
    checkpoint = Checkpoint.open(model)
    with pytest.raises(ConfigurationError, match="the least that works") as refused:
        plan_memory(checkpoint, 40 * MIB, None, None, 256)
    smallest = re.search(r"least that works is --ram=(\d+M)", str(refused.value))
    assert smallest
    spare = 80 * MIB
    ram = parse_size(smallest[1]) - memory.MARGIN_BYTES + spare
    plan = plan_memory(checkpoint, ram, None, None, 256)
    least_kv = 256 * plan.kv_token_bytes
    assert plan.kv_bytes == pytest.approx(least_kv + spare // 2, abs=MIB)
    assert plan.context_length > 256
    assert plan.slots_per_layer > 8


def test_a_process_without_a_budget_takes_most_of_what_is_available() -> None:
    assert default_ram() == pytest.approx(0.8 * available_memory(), rel=0.2)
    engine = Engine.open(TINY, ram=None, warm=False)
    assert engine.memory.ram <= parse_size("8192G")
    assert engine.cache.slots_per_layer == engine.experts
    engine.close()


def test_a_smaller_number_of_experts_is_obeyed_whatever_the_budget() -> None:
    engine = Engine.open(TINY, ram="8G", experts_per_layer=5, warm=False)
    assert engine.cache.slots_per_layer == 5
    engine.close()
    with pytest.raises(ConfigurationError, match="--experts-per-layer=3 is too small"):
        Engine.open(TINY, ram="8G", experts_per_layer=3, warm=False)
