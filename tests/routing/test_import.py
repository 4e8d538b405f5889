"""The package is imported by everything that reads a setting, so it must stay light."""

from __future__ import annotations

import subprocess
import sys


def test_importing_routing_does_not_load_the_compiler() -> None:
    """Numba also fixes its code cache folder when it meets the functions: not before the engine chose it."""
    program = "import sys, coli_server.routing; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
