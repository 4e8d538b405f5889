"""Perplexity of the default model on held-out text, by experts a token.

python -m coli_server.models.evaluate --experts-per-token 16 12 8 4
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.pull import ensure_default_model
from coli_server.settings import cache_folder

WINDOW = 512


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: the default model)")
    parser.add_argument("--experts-per-token", type=int, nargs="+", default=[8], metavar="K")
    parser.add_argument("--data-set", default="sotu", choices=["sotu", "moby-dick"])
    parser.add_argument("--windows", type=int, default=32, metavar="N", help=f"{WINDOW} tokens each")
    parser.add_argument("--ram", default="2G", metavar="SIZE")
    arguments = parser.parse_args(words)
    folder = arguments.model or ensure_default_model()
    names = [name for name in splits()["evaluation"] if name.startswith(arguments.data_set + "/")]
    texts = list(fetch_texts(cache_folder() / "downloads", names).values())
    for k in arguments.experts_per_token:
        with with_experts_per_token(folder, k) as variant:
            engine = Engine.open(variant, ram=arguments.ram)
            windows = token_windows([engine.text.encode(text) for text in texts], arguments.windows)
            nll = np.concatenate([negative_log_likelihood(engine, window) for window in windows])
            engine.close()
        print(f"{k} experts a token: perplexity {np.exp(nll.mean()):.3f} over {nll.size} tokens", flush=True)
    return 0


@contextmanager
def with_experts_per_token(folder: Path, k: int) -> Iterator[Path]:
    """A folder with the same files, of which `config.json` alone is changed: K experts a token."""
    with tempfile.TemporaryDirectory() as name:
        variant = Path(name)
        for path in folder.iterdir():
            if path.name != "config.json":
                (variant / path.name).symlink_to(path.absolute())
        config = json.loads((folder / "config.json").read_text())
        (variant / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": k}))
        yield variant


def token_windows(documents: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` windows of `WINDOW` tokens, spread evenly over all whole windows of the documents."""
    windows = [
        list(ids[start : start + WINDOW])
        for ids in documents
        for start in range(0, len(ids) - WINDOW + 1, WINDOW)
    ]
    picked = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return [windows[i] for i in picked]


def negative_log_likelihood(engine: Engine, ids: Sequence[int]) -> NDArray[np.float64]:
    """-ln p of every token but the first, given those before it, [tokens - 1]."""
    logits = engine.logits(ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = logits[np.arange(len(logits)), np.asarray(ids[1:])]
    return np.asarray(np.log(np.exp(logits).sum(axis=-1)) - chosen)


if __name__ == "__main__":
    sys.exit(main())
