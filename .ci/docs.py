"""Write the parts of the documents that are made from code. Run it after changing a setting or a figure."""

import re
from pathlib import Path

from coli_server import settings
from coli_server.protocol import reference
from coli_server.telemetry import table

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "docs/STAT.md": ("figures", table.markdown),
    "docs/PROTOCOL.md": ("reference", reference.markdown),
    "README.md": ("settings", settings.markdown_table),
}


def updated(name: str) -> str:
    """The document `name` as it should be: what stands between the two marks is made anew."""
    part, make = PARTS[name]
    marks = re.compile(rf"(<!-- {part}: begin [^\n]*-->\n).*?(<!-- {part}: end -->\n)", re.DOTALL)
    text, count = marks.subn(lambda match: match[1] + make() + match[2], (ROOT / name).read_text("utf-8"))
    if count != 1:
        raise SystemExit(f"{name} must have the marks of the part {part!r} exactly once, found {count}")
    return text


if __name__ == "__main__":
    for document in PARTS:
        (ROOT / document).write_text(updated(document), "utf-8")
