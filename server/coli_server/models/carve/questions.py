"""Greedy answers to plain questions by the dense model and by the carved one, as a Markdown table.

python -m coli_server.models.carve.questions [FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coli_server.engine import Engine
from coli_server.models.evaluate import with_experts_per_token
from coli_server.models.pull import ensure_default_model

ALL_EXPERTS = 16
"""With every expert active the carved model is the dense one."""

_QUESTIONS = Path(__file__).with_name("questions.txt")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.questions", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder (default: the default model)")
    parser.add_argument("--experts-per-token", type=int, default=8, metavar="K")
    parser.add_argument("--max", type=int, default=96, metavar="N", help="tokens of an answer")
    arguments = parser.parse_args(words)
    folder = arguments.folder or ensure_default_model()
    asked = questions()
    dense = answers(folder, ALL_EXPERTS, asked, arguments.max)
    carved = answers(folder, arguments.experts_per_token, asked, arguments.max)
    print(f"| question | dense | {arguments.experts_per_token} of {ALL_EXPERTS} experts |\n|---|---|---|")
    for row in zip(asked, dense, carved, strict=True):
        print("| " + " | ".join(cell(text) for text in row) + " |")
    return 0


def questions() -> list[str]:
    return _QUESTIONS.read_text().splitlines()


def answers(folder: Path, k: int, asked: Sequence[str], limit: int) -> list[str]:
    """Greedy answers with k experts a token, at most `limit` tokens; a cut one ends in an ellipsis."""
    texts = []
    with with_experts_per_token(folder, k) as variant:
        engine = Engine.open(variant)
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
