"""Perplexity of the default model on held-out text, by experts a token.

python -m coli_server.models.evaluate --dense --experts-per-token 12 8 4
python -m coli_server.models.evaluate --converted FOLDER...      what converting has cost
python -m coli_server.models.evaluate --rounded                  what ACTIVATIONS=bfloat16 costs
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.models.carve.plan import cut
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.checkpoint import write_model
from coli_server.models.dense import read_gguf
from coli_server.models.progress import Progress
from coli_server.models.pull import DEFAULT_MODEL, PinnedModel, ensure_default_model
from coli_server.models.source import fetch_source
from coli_server.settings import cache_folder

WINDOW = 512


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: the default model)")
    parser.add_argument("--experts-per-token", type=int, nargs="+", default=[8], metavar="K")
    parser.add_argument("--dense", action="store_true", help="the default model's dense source too")
    parser.add_argument("--converted", type=Path, nargs="+", default=[], help="other forms of the model")
    parser.add_argument(
        "--rounded", action="store_true", help="the model with activations rounded to bfloat16"
    )
    parser.add_argument("--data-set", default="sotu", choices=["sotu", "moby-dick"])
    parser.add_argument("--windows", type=int, default=32, metavar="N", help=f"{WINDOW} tokens each")
    parser.add_argument("--ram", default="2G", metavar="SIZE")
    arguments = parser.parse_args(words)
    folder = arguments.model or ensure_default_model()
    names = [name for name in splits()["evaluation"] if name.startswith(arguments.data_set + "/")]
    texts = list(fetch_texts(cache_folder() / "downloads", names).values())
    for converted in arguments.converted:
        engines = Engine.open(folder, ram=arguments.ram), Engine.open(converted, ram=arguments.ram)
        print(f"{converted}: {cost_of(*engines, texts, arguments.windows)}", flush=True)
    if arguments.rounded:
        exact = Engine.open(folder, ram=arguments.ram)
        rounded = Engine.open(folder, ram=arguments.ram, activations="bfloat16")
        print(f"rounded activations: {cost_of(exact, rounded, texts, arguments.windows)}", flush=True)
    if arguments.converted or arguments.rounded:
        return 0
    if arguments.dense:
        with dense_folder() as dense:
            print(f"dense: {perplexity_of(dense, texts, arguments.windows, arguments.ram)}", flush=True)
    for k in arguments.experts_per_token:
        with with_experts_per_token(folder, k) as variant:
            measured = perplexity_of(variant, texts, arguments.windows, arguments.ram)
        print(f"{k} experts a token: {measured}", flush=True)
    return 0


def perplexity_of(folder: Path, texts: Sequence[str], count: int, ram: str) -> str:
    """Perplexity on `count` windows of `texts`, in words."""
    engine = Engine.open(folder, ram=ram)
    windows = token_windows([engine.text.encode(text) for text in texts], count)
    nll = np.concatenate([negative_log_likelihood(engine, window) for window in windows])
    engine.close()
    return f"perplexity {np.exp(nll.mean()):.3f} over {nll.size} tokens"


@dataclass(frozen=True)
class Cost:
    """What another form of a model costs on the same text: perplexities, the mean Kullback-Leibler
    divergence in nats from the original's distribution, and how often the likeliest token is the same."""

    tokens: int
    original: float
    converted: float
    kl: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.original:.3f} -> {self.converted:.3f} "
            f"({100 * (self.converted / self.original - 1):+.2f} %), KL {self.kl:.5f} nats, "
            f"same likeliest token {100 * self.agreement:.2f} %, {self.tokens} tokens"
        )


def cost_of(original: Engine, other: Engine, texts: Sequence[str], windows: int) -> Cost:
    """Compare two forms of one model on `windows` windows of `texts`; closes both."""
    engines = (original, other)
    nll: tuple[list[float], list[float]] = ([], [])
    kl: list[float] = []
    same: list[bool] = []
    for ids in token_windows([engines[0].text.encode(text) for text in texts], windows):
        p, q = (log_probabilities(engine, ids) for engine in engines)
        rows, chosen = np.arange(len(p)), np.asarray(ids[1:])
        for losses, log in zip(nll, (p, q), strict=True):
            losses += (-log[rows, chosen]).tolist()
        kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    for engine in engines:
        engine.close()
    before, after = (float(np.exp(np.mean(losses))) for losses in nll)
    return Cost(len(kl), before, after, float(np.mean(kl)), float(np.mean(same)))


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


@contextmanager
def dense_folder(model: PinnedModel = DEFAULT_MODEL) -> Iterator[Path]:
    """A folder with the dense source of `model`: its carving with every expert active at weight 1."""
    source = fetch_source(model.source, cache_folder() / "downloads", None, Progress.to_stderr())
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), read_gguf(source), model.load_recipe().neutral(), lambda: None)
        yield Path(name)


def token_windows(documents: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` windows of `WINDOW` tokens, spread evenly over all whole windows of the documents."""
    windows = [window for ids in documents for window in cut(ids, WINDOW)]
    picked = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return [windows[i] for i in picked]


def negative_log_likelihood(engine: Engine, ids: Sequence[int]) -> NDArray[np.float64]:
    """-ln p of every token but the first, given those before it, [tokens - 1]."""
    log = log_probabilities(engine, ids)
    return np.asarray(-log[np.arange(len(log)), np.asarray(ids[1:])])


def log_probabilities(engine: Engine, ids: Sequence[int]) -> NDArray[np.float64]:
    """ln p of the whole vocabulary behind every token but the last, [tokens - 1, vocab]."""
    logits = engine.logits(ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


if __name__ == "__main__":
    sys.exit(main())
