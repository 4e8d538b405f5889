import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["docs/STAT.md", "docs/PROTOCOL.md", "README.md"])
def test_generated_parts_of_the_documents_are_current(name: str) -> None:
    updated = runpy.run_path(str(ROOT / ".ci/docs.py"))["updated"]
    assert (ROOT / name).read_text("utf-8") == updated(name), "run `.venv/bin/python .ci/docs.py`"
