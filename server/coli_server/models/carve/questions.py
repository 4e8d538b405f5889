"""Greedy answers to plain questions by the dense model and by the carved one, as a Markdown table.

python -m coli_server.models.carve.questions [FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coli_server.engine import Engine
from coli_server.models.evaluate import dense_folder
from coli_server.models.pull import ensure_default_model

_QUESTIONS = Path(__file__).with_name("questions.txt")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.questions", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder (default: the default model)")
    parser.add_argument("--max", type=int, default=96, metavar="N", help="tokens of an answer")
    arguments = parser.parse_args(words)
    folder = arguments.folder or ensure_default_model()
    asked = questions()
    with dense_folder() as whole:
        dense = answers(whole, asked, arguments.max)
    carved = answers(folder, asked, arguments.max)
    print("| question | dense | carved |\n|---|---|---|")
    for row in zip(asked, dense, carved, strict=True):
        print("| " + " | ".join(cell(text) for text in row) + " |")
    return 0


def questions() -> list[str]:
    return _QUESTIONS.read_text().splitlines()


def answers(folder: Path, asked: Sequence[str], limit: int) -> list[str]:
    """Greedy answers of at most `limit` tokens; a cut one ends in an ellipsis."""
    texts = []
    engine = Engine.open(folder)
    for question in asked:
        prompt = engine.text.encode_chat([{"role": "user", "content": question}])
        ids = engine.generate(prompt, limit)
        texts.append(engine.text.decode(ids).strip() + ("…" if len(ids) == limit else ""))
    engine.close()
    return texts


def cell(text: str) -> str:
    """Text as one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")


if __name__ == "__main__":
    sys.exit(main())
