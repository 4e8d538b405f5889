"""Texts to measure on, as windows of tokens of one length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coli_server.engine.text import Text
from coli_server.errors import ConfigurationError
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.settings import cache_folder

Window = tuple[int, ...]


def read_texts(files: Sequence[Path]) -> list[str]:
    """The texts of `files`; without any, those that the default model's makers kept for evaluation.

    Raises ConfigurationError for a file that cannot be read as UTF-8.
    """
    if not files:
        return list(fetch_texts(cache_folder() / "downloads", splits()["evaluation"]).values())
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--text={file}: cannot be read as UTF-8: {error}") from None
    return texts


def windows_of(text: Text, documents: Sequence[str], count: int, length: int) -> list[Window]:
    """`count` windows of `length` tokens, spread evenly over all whole windows of the documents.

    Fewer where the documents have fewer. Raises ConfigurationError where they have none.
    """
    ids = [text.encode(document) for document in documents]
    starts = [(n, at) for n, each in enumerate(ids) for at in range(0, len(each) - length + 1, length)]
    if not starts:
        longest = max((len(each) for each in ids), default=0)
        raise ConfigurationError(f"the longest text has {longest} tokens: a window needs {length}")
    picked = np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(int)
    return [tuple(ids[n][at : at + length]) for n, at in (starts[i] for i in picked)]
