"""Run Coli's own tests. Every argument is pytest's: `coli test tests/routing -x`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from coli_server.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]


def main(words: Sequence[str]) -> int:
    if not (ROOT / "tests").is_dir():
        raise ConfigurationError(
            "the tests are part of the source tree, which this installation does not have"
        )
    import pytest

    paths = [_absolute(word) for word in words]
    os.chdir(ROOT)
    return int(pytest.main(paths))


def _absolute(word: str) -> str:
    """A path (or `path::test`) of the current folder names the same file after the change of folder."""
    path, separator, test = word.partition("::")
    return f"{Path(path).absolute()}{separator}{test}" if Path(path).exists() else word
