"""What names a model: a folder, or an id of the Hugging Face hub."""

import re
from pathlib import Path

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def is_hub_id(word: str) -> bool:
    """Whether `word` is `owner/name` or `owner/name@revision`, and not the path of something that is here."""
    return HUB_ID.fullmatch(word) is not None and word[0] not in "./" and not Path(word).exists()
