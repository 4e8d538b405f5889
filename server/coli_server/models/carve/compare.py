"""Compare a model folder's logits with those of Hugging Face `transformers` (extra `carve`).

python -m coli_server.models.carve.compare [FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coli_server.engine import Engine
from coli_server.models.evaluate import with_experts_per_token
from coli_server.models.pull import ensure_default_model

TEXT = (
    "The capital of France is Paris. What is 17 plus 2025? Naïve — 日本語.\n\n"
    "def add(a, b):\n    return a + b\n"
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.compare", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder (default: the default model)")
    parser.add_argument("--experts-per-token", type=int, nargs="+", default=[16, 8], metavar="K")
    arguments = parser.parse_args(words)
    folder = arguments.folder or ensure_default_model()
    for k in arguments.experts_per_token:
        with with_experts_per_token(folder, k) as variant:
            engine = Engine.open(variant)
            ids = engine.text.encode(TEXT)
            ours = engine.logits(ids)
            engine.close()
            model = AutoModelForCausalLM.from_pretrained(variant, dtype=torch.float32)
            with torch.inference_mode():
                theirs = model(torch.tensor([ids])).logits[0].numpy()
        apart = np.abs(ours - theirs).max(axis=1)
        same = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
        print(
            f"{k} experts a token: logits at most {apart.max():.1e} apart, {np.median(apart):.1e} at the "
            f"median token; the same best token for {same:.0%} of {len(ids)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
