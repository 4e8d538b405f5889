"""What an interrupted run has left in its work folder."""

import json
from pathlib import Path
from typing import Any


def finished_lines(file: Path) -> list[Any]:
    """What each finished line of a file of JSON lines holds; without a file, nothing.

    A line that was cut off is removed from the file.
    """
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        file.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
