"""What routing is worth: held-out perplexity and KL to the dense model with the recipe's router, with an
oracle that picks the experts of largest output norm, and with experts picked at random.

    python -m coli_server.models.carve.report --windows 24
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.cluster import expert_energy, neuron_energy, swiglu, top_mask
from coli_server.models.carve.forward import Float32, Layer, attention, load_layer, rms_norm, rounded, softmax
from coli_server.models.carve.layerwise import CarvedLayer
from coli_server.models.carve.router import Router
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.dense import DenseModel, bfloat16_values, read_gguf
from coli_server.models.evaluate import token_windows
from coli_server.models.progress import Progress
from coli_server.models.pull import DEFAULT_MODEL
from coli_server.models.recipe import Recipe, load_recipe
from coli_server.models.source import fetch_source
from coli_server.models.tokenizer import build_tokenizer
from coli_server.settings import cache_folder

Scores = Callable[[CarvedLayer, Float32, Float32, Layer], Float32]
"""(carved, u, activation, layer) -> what experts are picked by, [tokens, experts]."""


def by_router(carved: CarvedLayer, u: Float32, _activation: Float32, _layer: Layer) -> Float32:
    return carved.scores(u)


def by_output_norm(carved: CarvedLayer, _u: Float32, activation: Float32, layer: Layer) -> Float32:
    return expert_energy(neuron_energy(activation, layer.down), carved.owners, carved.experts)


def at_random(seed: int) -> Scores:
    dice = np.random.default_rng(seed)

    def scores(carved: CarvedLayer, u: Float32, _activation: Float32, _layer: Layer) -> Float32:
        return dice.random((len(u), carved.experts), dtype=np.float32)

    return scores


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.report", description=__doc__)
    parser.add_argument("--data-set", default="sotu", choices=["sotu", "moby-dick"])
    parser.add_argument("--windows", type=int, default=24, metavar="N")
    parser.add_argument("--experts-per-token", type=int, nargs="+", default=[12, 8, 4], metavar="K")
    arguments = parser.parse_args(words)
    downloads = cache_folder() / "downloads"
    dense = read_gguf(fetch_source(DEFAULT_MODEL.source, downloads, None, Progress.to_stderr()))
    recipe = load_recipe(DEFAULT_MODEL.recipe, DEFAULT_MODEL.recipe_sha256)
    names = [name for name in splits()["evaluation"] if name.startswith(arguments.data_set + "/")]
    tokenizer = build_tokenizer(dense.vocabulary)
    documents = [tokenizer.encode(text).ids for text in fetch_texts(downloads, names).values()]
    ids = np.array(token_windows(documents, arguments.windows))
    expected = hidden_states(dense, ids)
    _print("dense model", dense, ids, expected, expected)
    for k in arguments.experts_per_token:
        _print(f"{k} by router", dense, ids, hidden_states(dense, ids, recipe, k, by_router), expected)
    k = recipe.experts_per_token
    for name, scores in (("oracle", by_output_norm), ("at random", at_random(0))):
        _print(f"{k} by {name}", dense, ids, hidden_states(dense, ids, recipe, k, scores), expected)
    return 0


def carved_layer(recipe: Recipe, layer: int) -> CarvedLayer:
    """A layer of a recipe in the form that the carving works with."""
    owners = np.zeros(recipe.order.shape[1], dtype=np.int64)
    for expert in range(recipe.experts):
        owners[recipe.expert_neurons(layer, expert)] = 1 + expert
    return CarvedLayer(owners, Router(bfloat16_values(recipe.router[layer]), recipe.router_bias[layer]))


def hidden_states(
    dense: DenseModel,
    ids: NDArray[np.int64],
    recipe: Recipe | None = None,
    k: int = 0,
    scores: Scores = by_router,
) -> Float32:
    """Final states [windows, tokens, hidden] of the dense model, or of the carved one with k experts."""
    eps = dense.config.norm_eps
    x = rounded(dense, "model.embed_tokens.weight")[ids]
    for number in range(dense.config.layers):
        layer = load_layer(dense, number)
        carved = carved_layer(recipe, number) if recipe else None
        for window in x:
            window += attention(dense, layer, window[None])[0]
            u = rms_norm(window, layer.ffn_norm, eps)
            activation = swiglu(u, layer.gate, layer.up)
            if carved:
                activation *= carved.active(top_mask(scores(carved, u, activation, layer), k))
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
