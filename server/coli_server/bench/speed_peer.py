"""The peer's side of `coli bench speed`: llama-cpp-python, by its own interpreter. Imports nothing of Coli.

    python speed_peer.py quantize IN.gguf OUT.gguf q8_0|q4_0
    python speed_peer.py run MODEL.gguf THREADS

`run` answers each line of standard input, a JSON object, with one on standard output.
"""

import importlib
import json
import sys
import time
from typing import Any

llama_cpp: Any = importlib.import_module("llama_cpp")  # of an interpreter that is not Coli's
FILE_TYPES = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def quantize(source: str, target: str, kind: str) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[kind]
    options.pure = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        raise SystemExit(f"{source} cannot be quantised")


def run(model: str, threads: int) -> None:
    started = time.perf_counter()
    peer = llama_cpp.Llama(
        model,
        n_ctx=1024,
        n_batch=256,
        n_ubatch=256,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    answer({"version": llama_cpp.__version__, "seconds": time.perf_counter() - started})
    for line in sys.stdin:
        task = json.loads(line)
        answer(prefill(peer, task["ids"]) if task["do"] == "prefill" else decode(peer, task["ids"]))


def prefill(peer: Any, ids: "list[int]") -> "dict[str, object]":
    """Read a prompt; its logits behind the last token, every 1,571st."""
    peer.reset()
    start = time.perf_counter()
    peer.eval(ids)
    seconds = time.perf_counter() - start
    pointer = llama_cpp.llama_get_logits_ith(peer._ctx.ctx, -1)
    return {"seconds": seconds, "logits": [pointer[i] for i in range(0, peer.n_vocab(), 1571)]}


def decode(peer: Any, ids: "list[int]") -> "dict[str, object]":
    """Tokens one by one behind what was read before."""
    start = time.perf_counter()
    for token in ids:
        peer.eval([token])
    return {"seconds": time.perf_counter() - start}


def answer(value: "dict[str, object]") -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(sys.argv[2], sys.argv[3], sys.argv[4])
    else:
        run(sys.argv[2], int(sys.argv[3]))
