import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["docs/STAT.md", "docs/PROTOCOL.md", "README.md"])
def test_generated_parts_of_the_documents_are_current(name: str) -> None:
    updated = runpy.run_path(str(ROOT / ".ci/docs.py"))["updated"]
    assert (ROOT / name).read_text("utf-8") == updated(name), "run `.venv/bin/python .ci/docs.py`"


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda path: path.name
)
def test_every_link_to_a_file_of_the_project_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", path.read_text("utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
