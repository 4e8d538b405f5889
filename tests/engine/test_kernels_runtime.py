"""Code cache, threading layer, and processors other than this one."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from coli_server.engine import kernels
from coli_server.engine.kernels import Kind, runtime
from coli_server.engine.kernels.formats import prepared_row_bytes
from coli_server.engine.quantised import quantise
from coli_server.errors import ConfigurationError
from support.arrays import error, normal, stored, threads

COMPILED = """
import sys
from numba.core.dispatcher import Dispatcher

def compiled():
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("coli_server.engine.kernels")]
    return {id(f): f for m in modules for f in vars(m).values() if isinstance(f, Dispatcher)}.values()
"""

WARM = """
import json
from coli_server.engine import kernels
kernels.setup(1)
kernels.warm()
print(json.dumps([sum(sum(getattr(f.stats, kind).values()) for f in compiled())
                  for kind in ("cache_hits", "cache_misses")]))
"""

USE = """
import json
import numpy as np
from coli_server.engine import kernels
from coli_server.engine.kernels import ExpertShape, Kind
kernels.setup(2)
kernels.warm()
before = sum(len(f.signatures) for f in compiled())
one, row = np.zeros(3, np.int32), np.zeros((3, 2, 64), np.float32)
flat = row.reshape(3, 128)
for kind, dtype in ((Kind.BF16, np.uint16), (Kind.F32, np.float32)):
    kernels.linear(flat, np.zeros((999, 128), dtype), kind, np.zeros(999, np.float32))
kernels.rms_norm(flat, flat[0], 1e-6)
kernels.layer_norm(flat, flat[0], flat[0], 1e-6, flat)
kernels.silu_mul(flat, flat, flat)
kernels.combine(flat, np.zeros((1, 3), np.float32), flat[:1])
for turns in (False, True):
    kernels.rope(row, np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32), turns)
cache = np.zeros((70, 1, 64), np.float32)
kernels.attention(row, cache, cache, np.arange(3, dtype=np.int32), 0.1, window=2,
                  sinks=np.zeros(2, np.float32), allowed=np.zeros((3, 4), np.int32))
shape = ExpertShape(Kind.BF16, 128, 8, 0, 2048, 4096)
slot = np.zeros(3 * 2048, np.uint8)
kernels.experts_ffn(flat, one, np.array([0, 3], np.int32), np.array([slot.ctypes.data]), shape,
                    np.zeros((3, shape.hidden), np.float32), np.zeros((3, 128), np.float32), one)
print(json.dumps([before, sum(len(f.signatures) for f in compiled())]))
"""

PRODUCT = """
import sys
import numpy as np
from coli_server.engine import kernels
from coli_server.engine.kernels import lanes
x, w = np.load(sys.argv[1]), np.load(sys.argv[2])
np.savez(sys.argv[4], y=kernels.linear(x, w, int(sys.argv[3])), s=kernels.silu_mul(x, x, np.empty_like(x)),
         flags=np.array([lanes.HAS_FMA, lanes.HAS_HALF_CONVERSION]))
"""

HASWELL = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2,+popcnt,+lzcnt"


def python(program: str, *arguments: str, **environment: str) -> str:
    """What `program` prints, run by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_compiles_nothing() -> None:
    python(COMPILED + WARM)
    hits, misses = json.loads(python(COMPILED + WARM))
    assert misses == 0
    assert hits >= 10  # every kernel at least once


def test_warm_leaves_nothing_to_compile_for_real_calls() -> None:
    before, after = json.loads(python(COMPILED + USE, NUMBA_NUM_THREADS="2"))
    assert after == before


@pytest.mark.parametrize(("cpu", "features"), [("x86-64", ""), ("haswell", HASWELL)])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.I8_32, Kind.I4_64, Kind.BF16_DOT])
def test_kernels_run_on_lesser_processors(cpu: str, features: str, kind: Kind, tmp_path: Path) -> None:
    """Without AVX-512 the bits stay where this machine too multiplies weight by weight; without fused
    multiply-add they may differ, but not by much."""
    if platform.machine() != "x86_64":  # only Numba's own target is known elsewhere
        cpu, features = "", ""
    rng = np.random.default_rng(0)
    x, plain = normal(rng, 7, 83), normal(rng, 21, 83)
    w = quantise(plain, kind) if kind.quantised else stored(plain, kind)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "w.npy", w)
    names = [str(tmp_path / name) for name in ("x.npy", "w.npy")]
    chosen = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features} if cpu else {}
    python(PRODUCT, *names, str(int(kind)), str(tmp_path / "got.npz"), **chosen)
    got = np.load(tmp_path / "got.npz")
    y, s = kernels.linear(x, w, kind), kernels.silu_mul(x, x, np.empty_like(x))
    if features:
        assert got["flags"].all()
        np.testing.assert_array_equal(got["s"], s)
    if features and not prepared_row_bytes(kind, 83):
        np.testing.assert_array_equal(got["y"], y)
    assert error(got["y"], y.astype(np.float64)) < 5e-5
    np.testing.assert_allclose(got["s"], s, rtol=1e-5)


def test_an_edited_source_gets_a_cache_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runtime.code_cache_folder()
    shutil.copytree(runtime._ENGINE_SOURCES, tmp_path / "coli_server")
    monkeypatch.setattr(runtime, "_ENGINE_SOURCES", tmp_path / "coli_server")
    assert runtime.code_cache_folder() == before
    with (tmp_path / "coli_server/engine/kernels/lanes.py").open("a") as source:
        source.write("# edited\n")
    assert runtime.code_cache_folder() != before


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENBLAS_THREAD_TIMEOUT", "OMP_WAIT_POLICY", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    runtime.prepare_environment()
    assert {
        os.environ[name] for name in ("OPENBLAS_THREAD_TIMEOUT", "OMP_WAIT_POLICY", "NUMBA_CACHE_DIR")
    } == {str(tmp_path)}


def test_the_threading_layer_is_tbb_where_its_wheel_exists() -> None:
    rng = np.random.default_rng(0)
    with threads(2):
        kernels.linear(normal(rng, 64, 512), normal(rng, 512, 512), Kind.F32)
    if platform.machine() == "x86_64":
        assert numba.threading_layer() == "tbb"


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_a_thread_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"threads must be from 1 to \d+ on this machine, not {count}"
    ):
        kernels.setup(count)
