"""The process around the kernels: code cache folder, threading layer, thread count.

Importing this module costs nothing: Numba itself is loaded only by `setup`.
"""

import ctypes
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from coli_server.errors import ConfigurationError

_ENGINE_SOURCES = Path(__file__).resolve().parents[2]
_COMPILED_PACKAGES = ("engine/kernels", "routing")

_threads = 1


def thread_count() -> int:
    """The number of threads among which kernels share their work: one before `setup`.

    Kernels get it as an argument, because Numba caches no function that asks for it.
    """
    return _threads


def prepare_environment() -> None:
    """Set the variables that NumPy's BLAS, OpenMP and Numba read once, when they load; load TBB.

    What the user has set stays. A BLAS pool that spins after a call slows the kernels many times over, and
    so does an OpenMP pool while another process holds a core; both are told to sleep instead. Numba takes the
    first threading layer that it finds when it loads a parallel function: TBB, OpenMP, its own queue. For a
    single processor it is told to take its own: TBB, started by another thread than the main one, would wait
    at the end of the process for a task that nobody runs.
    """
    single = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1
    if single:
        os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("NUMBA_CACHE_DIR", str(code_cache_folder()))
    if "numba" in sys.modules:  # it has read its variables already
        from numba.core import config

        config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
    if not single:
        _load_tbb()


def code_cache_folder() -> Path:
    """The folder of the machine code of exactly these sources on this processor.

    Numba looks only at the file that holds a function, so an edited intrinsic would otherwise run on as stale
    machine code.
    """
    digest = hashlib.sha256()
    for part in (_numba_version(), platform.machine(), platform.python_version(), _processor()):
        digest.update(part.encode() + b"\0")
    for package in _COMPILED_PACKAGES:
        for source in sorted((_ENGINE_SOURCES / package).rglob("*.py")):
            digest.update(source.read_bytes() + b"\0")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "coli" / f"kernels-{digest.hexdigest()[:16]}"


def setup(threads: int) -> None:
    """Give the calling thread, the one that runs kernels, its number of kernel threads.

    Raises ConfigurationError where `threads` is not within 1 and the number of processors.
    """
    prepare_environment()
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= most:
        raise ConfigurationError(f"threads must be from 1 to {most} on this machine, not {threads}")
    numba.set_num_threads(threads)
    global _threads
    _threads = threads


def _load_tbb() -> None:
    """Make libtbb known to the loader: the wheel puts it into <prefix>/lib, where Numba does not look."""
    for name in ("libtbb.so.12", str(Path(sys.prefix) / "lib" / "libtbb.so.12")):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


def _numba_version() -> str:
    try:
        return metadata.version("numba")
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    """The processor's model and features, as far as the system tells (a home folder may be shared)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            wanted = ("model name", "flags", "Features")
            first = {line.split(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    except OSError:
        return platform.processor()
    return "".join(sorted(first.values()))
