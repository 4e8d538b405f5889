"""Train the routers and output scales of a recipe against the dense model, end to end (extra `carve`).

python -m coli_server.models.carve.distil START RECIPE

START is a recipe that `python -m coli_server.models.carve` has made. Only routers, their biases and output
scales are learnt; the weights of the dense model stay as they are, and neurons stay in their experts. What
is finished is kept in the work folder, so an interrupted run goes on and ends as if it had not been
interrupted.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from coli_server.errors import ModelError
from coli_server.models.carve.dialogues import dialogues
from coli_server.models.carve.plan import Plan, Source, cut, drawn, packed, rate_factor
from coli_server.models.carve.prompts import all_prompts
from coli_server.models.carve.student import (
    Frozen,
    Routers,
    Tensor,
    finished_recipe,
    hidden_states,
    load_frozen,
    log_probabilities,
    starting_routers,
)
from coli_server.models.carve.text import fetch_texts, splits
from coli_server.models.dense import DenseModel, read_gguf
from coli_server.models.progress import Progress
from coli_server.models.pull import DEFAULT_MODEL
from coli_server.models.recipe import Recipe, dump_recipe, read_recipe
from coli_server.models.source import fetch_source
from coli_server.models.tokenizer import build_tokenizer
from coli_server.settings import cache_folder

KEEP_EVERY = 20
"""Steps between two writings of the work folder."""

SHARES = {"sotu": 0.6, "moby-dick": 0.15, "dialogues": 0.25}
"""Parts of the windows that come from each kind of text."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coli_server.models.carve.distil", description=__doc__)
    parser.add_argument("start", type=Path, metavar="START", help="the recipe to begin with")
    parser.add_argument("out", type=Path, metavar="RECIPE", help="the recipe to write")
    parser.add_argument("--work", type=Path, default=cache_folder() / "carve", metavar="FOLDER")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    for field in fields(Plan):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(
            name, type=type(field.default), default=field.default, help="default: %(default)s"
        )
    arguments = parser.parse_args(words)
    plan = Plan(**{field.name: getattr(arguments, field.name) for field in fields(Plan)})
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    downloads = cache_folder() / "downloads"
    dense = read_gguf(fetch_source(DEFAULT_MODEL.source, downloads, None, Progress.to_stderr()))
    start = read_recipe(arguments.start)
    sources = calibration(dense, downloads, arguments.work / "distil-dialogues.jsonl", plan)
    content = dump_recipe(distilled(dense, start, sources, plan, arguments.work / "distil.pt"))
    arguments.out.write_bytes(content)
    print(f"{arguments.out}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


def calibration(dense: DenseModel, downloads: Path, dialogue_file: Path, plan: Plan) -> list[Source]:
    """Windows of every kind of text; nothing of the documents for evaluation."""
    tokenizer = build_tokenizer(dense.vocabulary)
    windows: dict[str, list[list[int]]] = {name: [] for name in SHARES}
    for name, text in fetch_texts(downloads, splits()["calibration"]).items():
        windows[name.partition("/")[0]] += cut(tokenizer.encode(text).ids, plan.window)
    spoken = dialogues(dense, all_prompts(), dialogue_file)
    windows["dialogues"] = packed(spoken, plan.window, plan.seed)
    _say("windows: " + ", ".join(f"{len(found)} {name}" for name, found in windows.items()))
    return [Source(windows[name], share) for name, share in SHARES.items()]


def distilled(dense: DenseModel, start: Recipe, sources: Sequence[Source], plan: Plan, kept: Path) -> Recipe:
    """The recipe after `plan.steps` steps; what `kept` holds is gone on with."""
    if start.experts_per_token == start.experts:
        raise ModelError(
            f"the recipe runs all {start.experts} experts for a token: there is no choice to learn"
        )
    frozen = load_frozen(dense, start)
    # Text of no step, so that the first step is like every other.
    first = torch.from_numpy(drawn(sources, plan, plan.steps))
    routers = starting_routers(frozen, start, first, plan.spread)
    run = _Run(plan, routers, identity(start, plan))
    run.resume(kept)
    for step in range(run.step, plan.steps):
        ids = torch.from_numpy(drawn(sources, plan, step))
        loss = run.descend(frozen, ids, start.experts_per_token)
        if run.step % 10 == 0:
            _say(f"step {run.step} of {plan.steps}: loss {loss:.4f}, mean {run.mean:.4f} nats")
        if run.step % KEEP_EVERY == 0 or run.step == plan.steps:
            run.keep(kept)
    return finished_recipe(start, run.routers)


def identity(start: Recipe, plan: Plan) -> str:
    """Changes with whatever changes the run."""
    return hashlib.sha256(dump_recipe(start) + json.dumps(asdict(plan)).encode()).hexdigest()


class _Run:
    """Routers in training, with everything that the next step needs."""

    def __init__(self, plan: Plan, routers: Routers, identity: str) -> None:
        self.plan = plan
        self.routers = routers
        self.identity = identity
        self.step = 0
        self.mean = 0.0
        """Of the loss, moving, on text that is trained on."""
        self._rates = {
            "direction": plan.router_rate,
            "bias": plan.bias_rate,
            "log_scale": plan.scale_rate,
        }
        for name in self._rates:
            getattr(routers, name).requires_grad_()
        self._optimizer = torch.optim.Adam(
            [{"params": [getattr(routers, name)], "lr": rate} for name, rate in self._rates.items()],
            betas=(0.9, 0.98),
        )

    def descend(self, frozen: Frozen, ids: Tensor, k: int) -> float:
        """One step on windows `ids`; the loss, the divergence from the dense model in nats a token."""
        factor = rate_factor(self.step, self.plan.steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates.values(), strict=True):
            group["lr"] = rate * factor
        loss = divergence(frozen, ids, self.routers, k, self.plan.temperature)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([getattr(self.routers, name) for name in self._rates], 1.0)
        self._optimizer.step()
        value = float(loss.detach())
        self.mean = 0.95 * self.mean + 0.05 * value if self.step else value
        self.step += 1
        return value

    def keep(self, file: Path) -> None:
        """Write everything that `resume` needs; an interrupted writing leaves the file as it was."""
        state = {
            "identity": self.identity,
            "step": self.step,
            "mean": self.mean,
            "routers": {field.name: getattr(self.routers, field.name).detach() for field in fields(Routers)},
            "optimizer": self._optimizer.state_dict(),
        }
        new = file.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, file)

    def resume(self, file: Path) -> None:
        """Take over what an earlier run kept, if it did; `ModelError` if that was another run."""
        if not file.exists():
            return
        state: dict[str, Any] = torch.load(file, weights_only=True)
        if state["identity"] != self.identity:
            raise ModelError(f"{file}: is of a run with another START or other settings; remove it")
        with torch.no_grad():
            for name, values in state["routers"].items():
                getattr(self.routers, name).copy_(values)
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.mean = state["step"], state["mean"]
        _say(f"going on at step {self.step}")


def divergence(frozen: Frozen, ids: Tensor, routers: Routers, k: int, temperature: float) -> Tensor:
    """Mean Kullback-Leibler divergence of the carved model from the dense one, in nats a token."""
    with torch.no_grad():
        expected = log_probabilities(frozen, hidden_states(frozen, ids))
    found = log_probabilities(frozen, hidden_states(frozen, ids, routers, k, temperature))
    return functional.kl_div(
        found.flatten(0, 1), expected.flatten(0, 1), log_target=True, reduction="batchmean"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
