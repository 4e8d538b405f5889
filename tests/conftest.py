"""Fixtures for the tests of several packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}<assistant>"""


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny glm4_moe folder whose answers end only at `max`: no end token, 65,536 tokens of room.

    It has a chat template. About a thousand tokens a second: 60,000 of them outlast any test.
    """
    folder = tmp_path_factory.mktemp("models") / "endless"
    shutil.copytree(Path(__file__).parent / "data/models/glm4_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 65536, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
