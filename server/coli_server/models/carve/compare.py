"""Compare model folders' logits with those of Hugging Face `transformers` (extra `carve`).

python -m coli_server.models.carve.compare [FOLDER...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coli_server.engine import Engine
from coli_server.models.evaluate import dense_folder
from coli_server.models.pull import ensure_default_model

TEXT = (
    "The capital of France is Paris. What is 17 plus 2025? Naïve — 日本語.\n\n"
    "def add(a, b):\n    return a + b\n"
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.compare", description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="default: the default model, dense and carved"
    )
    arguments = parser.parse_args(words)
    if arguments.folders:
        for folder in arguments.folders:
            print(f"{folder}: {difference(folder)}", flush=True)
        return 0
    with dense_folder() as dense:
        print(f"dense: {difference(dense)}", flush=True)
    print(f"carved: {difference(ensure_default_model())}", flush=True)
    return 0


def difference(folder: Path) -> str:
    """How far apart the engine's logits on `TEXT` are from those of transformers, in words."""
    engine = Engine.open(folder)
    ids = engine.text.encode(TEXT)
    ours = engine.logits(ids)
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    apart = np.abs(ours - theirs).max(axis=1)
    same = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
    return (
        f"logits at most {apart.max():.1e} apart, {np.median(apart):.1e} at the median token; "
        f"the same best token for {same:.0%} of {len(ids)}"
    )


if __name__ == "__main__":
    sys.exit(main())
