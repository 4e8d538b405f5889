"""A daemon that rounds activations, or says why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import coli_client
from coli_server.engine.kernels.rounded import HAS_BFLOAT16_DOT


def test_a_daemon_that_rounds_answers_and_says_so(start_daemon, small_model: Path):
    flags = ("--model", str(small_model), "--activations", "bfloat16")
    if not HAS_BFLOAT16_DOT:
        command = [sys.executable, "-m", "coli_server.cli", "serve", "--listen", "127.0.0.1:0", *flags]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 2
        assert "COLI_ACTIVATIONS=bfloat16 needs a processor with AVX512-BF16" in ran.stderr
        return
    with (
        start_daemon(*flags) as daemon,
        coli_client.Client(daemon.host, daemon.port) as client,
        coli_client.Client(daemon.host, daemon.port) as other,
    ):
        alone = client.generate("one two three", max=12).wait().text
        beside = other.generate("four five six", max=60)
        together = client.generate("one two three", max=12).wait().text
        beside.wait()
        stat = client.stat()
        ready = next(line for line in daemon.log if line.startswith("READY"))
    assert alone
    assert together == alone
    assert ready.rstrip().endswith("mode=stock,bfloat16-activations")
    assert stat["mode"] == "stock,bfloat16-activations"
