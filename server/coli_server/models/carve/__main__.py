"""Make the recipe of the default model: python -m coli_server.models.carve

Runs layer by layer and keeps each finished layer in the work folder, so an interrupted run goes on.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.chat import dialogues
from coli_server.models.carve.cluster import swiglu
from coli_server.models.carve.forward import attention, load_layer, rms_norm, rounded
from coli_server.models.carve.layerwise import CarvedLayer, Settings, carve_layer
from coli_server.models.carve.plan import cut
from coli_server.models.carve.router import Router
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.dense import DenseModel, bfloat16_bits, read_gguf
from coli_server.models.progress import Progress
from coli_server.models.pull import DEFAULT_MODEL
from coli_server.models.recipe import Recipe, dump_recipe
from coli_server.models.source import fetch_source
from coli_server.models.tokenizer import build_tokenizer
from coli_server.settings import cache_folder

WINDOW = 256
BATCH = 16
"""Windows in one call of attention, which holds WINDOW x WINDOW scores for each head."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve", description=__doc__)
    parser.add_argument("out", type=Path, help="the recipe to write")
    parser.add_argument("--work", type=Path, default=cache_folder() / "carve", metavar="FOLDER")
    parser.add_argument("--addresses", type=int, default=64, metavar="N", help="windows of addresses")
    parser.add_argument("--novel", type=int, default=24, metavar="N", help="windows of Moby Dick")
    arguments = parser.parse_args(words)
    arguments.work.mkdir(parents=True, exist_ok=True)
    downloads = cache_folder() / "downloads"
    dense = read_gguf(fetch_source(DEFAULT_MODEL.source, downloads, None, Progress.to_stderr()))
    counts = {"sotu": arguments.addresses, "moby-dick": arguments.novel}
    ids, valid = calibration_windows(dense, downloads, counts, arguments.work / "dialogues.json")
    recipe = make_recipe(dense, ids, valid, Settings(), arguments.work)
    content = dump_recipe(recipe)
    arguments.out.write_bytes(content)
    print(f"{arguments.out}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


def calibration_windows(
    dense: DenseModel, downloads: Path, counts: dict[str, int], dialogue_file: Path
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids [windows, WINDOW] in random order, and which of them are no padding."""
    tokenizer = build_tokenizer(dense.vocabulary)
    random = np.random.default_rng(1)
    names = splits()["calibration"]
    rows: list[list[int]] = []
    for data_set, count in counts.items():
        texts = fetch_texts(downloads, [name for name in names if name.startswith(data_set + "/")])
        whole = [window for text in texts.values() for window in cut(tokenizer.encode(text).ids, WINDOW)]
        rows += [whole[i] for i in random.choice(len(whole), count, replace=False)]
    rows += [row[:WINDOW] for row in dialogues(dense, dialogue_file)]
    ids = np.full((len(rows), WINDOW), dense.vocabulary.pad)
    valid = np.zeros(ids.shape, dtype=bool)
    for place, row in zip(random.permutation(len(rows)), rows, strict=True):
        ids[place, : len(row)] = row
        valid[place, : len(row)] = True
    return ids, valid


def make_recipe(
    dense: DenseModel, ids: NDArray[np.int64], valid: NDArray[np.bool_], settings: Settings, work: Path
) -> Recipe:
    """Carve every layer on the inputs that it gets from the layers carved before it."""
    config = dense.config
    x = rounded(dense, "model.embed_tokens.weight")[ids]
    done: list[CarvedLayer] = []
    for number in range(config.layers):
        layer = load_layer(dense, number)
        for first in range(0, len(x), BATCH):
            x[first : first + BATCH] += attention(dense, layer, x[first : first + BATCH])
        tokens = x[valid]
        u = rms_norm(tokens, layer.ffn_norm, config.norm_eps)
        activation = swiglu(u, layer.gate, layer.up)
        kept = work / f"layer-{number:02d}.npz"
        if not kept.exists():
            # Every later layer sees the residual stream through a norm, so an error counts by its size
            # relative to that stream.
            importance = 1 / np.mean(np.square(tokens + activation @ layer.down.T), axis=-1)
            carved, loss = carve_layer(u, activation, importance, layer, settings)
            print(f"layer {number}: " + json.dumps(asdict(loss)), file=sys.stderr, flush=True)
            np.savez(kept, owners=carved.owners, weight=carved.router.weight, bias=carved.router.bias)
        with np.load(kept) as stored:
            done.append(CarvedLayer(stored["owners"], Router(stored["weight"], stored["bias"])))
        x[valid] = tokens + done[-1].output(u, activation, layer, settings.experts_per_token)
    return recipe_of(done, settings)


def recipe_of(layers: list[CarvedLayer], settings: Settings) -> Recipe:
    return Recipe(
        shared=settings.shared,
        experts_per_token=settings.experts_per_token,
        order=np.stack([np.argsort(layer.owners, kind="stable") for layer in layers]).astype(np.uint16),
        router=np.stack([bfloat16_bits(layer.router.weight) for layer in layers]),
        router_bias=np.stack([layer.router.bias for layer in layers]).astype(np.float32),
        scale=np.ones((len(layers), 1 + settings.experts, layers[0].router.weight.shape[1]), np.float16),
    )


if __name__ == "__main__":
    sys.exit(main())
