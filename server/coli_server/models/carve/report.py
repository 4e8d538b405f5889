"""What routing is worth: held-out perplexity and KL to the dense model with the recipe's router, with an
oracle that picks the experts of largest output norm, and with experts picked at random.

    python -m coli_server.models.carve.report --windows 24
    python -m coli_server.models.carve.report --recipe FILE
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.cluster import swiglu
from coli_server.models.carve.forward import Float32, attention, load_layer, rms_norm, rounded, softmax
from coli_server.models.carve.routed import Ranking, at_random, by_output_norm, by_router, routed_layer
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.dense import DenseModel, read_gguf
from coli_server.models.evaluate import token_windows
from coli_server.models.progress import Progress
from coli_server.models.pull import DEFAULT_MODEL
from coli_server.models.recipe import Recipe, read_recipe
from coli_server.models.source import fetch_source
from coli_server.models.tokenizer import build_tokenizer
from coli_server.settings import cache_folder


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.report", description=__doc__)
    parser.add_argument("--data-set", default="sotu", choices=["sotu", "moby-dick"])
    parser.add_argument("--windows", type=int, default=24, metavar="N")
    parser.add_argument("--experts-per-token", type=int, nargs="+", default=[12, 8, 4], metavar="K")
    parser.add_argument("--recipe", type=Path, help="a recipe (default: the default model's)")
    arguments = parser.parse_args(words)
    downloads = cache_folder() / "downloads"
    dense = read_gguf(fetch_source(DEFAULT_MODEL.source, downloads, None, Progress.to_stderr()))
    recipe = read_recipe(arguments.recipe) if arguments.recipe else DEFAULT_MODEL.load_recipe()
    names = [name for name in splits()["evaluation"] if name.startswith(arguments.data_set + "/")]
    tokenizer = build_tokenizer(dense.vocabulary)
    documents = [tokenizer.encode(text).ids for text in fetch_texts(downloads, names).values()]
    ids = np.array(token_windows(documents, arguments.windows))
    expected = hidden_states(dense, ids)
    _print("dense model", dense, ids, expected, expected)
    for k in arguments.experts_per_token:
        _print(f"{k} by router", dense, ids, hidden_states(dense, ids, recipe, k, by_router), expected)
    k = recipe.experts_per_token
    for name, ranking in (("by oracle", by_output_norm), ("at random", at_random(0))):
        _print(f"{k} {name}", dense, ids, hidden_states(dense, ids, recipe, k, ranking), expected)
    return 0


def hidden_states(
    dense: DenseModel,
    ids: NDArray[np.int64],
    recipe: Recipe | None = None,
    k: int = 0,
    ranking: Ranking = by_router,
) -> Float32:
    """Final states [windows, tokens, hidden] of the dense model, or of the carved one with k experts."""
    eps = dense.config.norm_eps
    x = rounded(dense, "model.embed_tokens.weight")[ids]
    for number in range(dense.config.layers):
        routed = routed_layer(dense, recipe, number) if recipe else None
        layer = routed.layer if routed else load_layer(dense, number)
        for window in x:
            window += attention(dense, layer, window[None])[0]
            u = rms_norm(window, layer.ffn_norm, eps)
            activation = swiglu(u, layer.gate, layer.up)
            if routed:
                window += routed.output(u, activation, k, ranking(routed, u, activation))
            else:
                window += activation @ layer.down.T
    return rms_norm(x, rounded(dense, "model.norm.weight"), eps)


def likelihood_and_divergence(
    head: Float32, ids: NDArray[np.int64], states: Float32, expected: Float32
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of one window, in nats, [tokens - 1]: -ln p of each next token, and KL of `states` from `expected`."""
    p, q = (softmax((h[:-1] @ head.T).astype(np.float64)) for h in (expected, states))
    # A probability under the smallest double is 0; its logarithm must stay finite.
    log_p, log_q = np.log(p + 1e-300), np.log(q + 1e-300)
    return -log_q[np.arange(len(q)), ids[1:]], np.einsum("tv,tv->t", p, log_p - log_q)


def _print(name: str, dense: DenseModel, ids: NDArray[np.int64], states: Float32, expected: Float32) -> None:
    head = rounded(dense, "model.embed_tokens.weight")
    pairs = [likelihood_and_divergence(head, *window) for window in zip(ids, states, expected, strict=True)]
    nll, divergence = (np.concatenate(values) for values in zip(*pairs, strict=True))
    print(
        f"{name:14} perplexity {np.exp(nll.mean()):7.3f}   KL to dense {divergence.mean():.4f} nats   "
        f"{nll.size} tokens",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
