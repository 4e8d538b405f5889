"""Describe a model folder: family, sizes, what a memory budget would hold, what a token would read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from coli_server.cli.arguments import make_parser
from coli_server.errors import ConfigurationError

if TYPE_CHECKING:
    from coli_server.models.inspect import Inspection


def main(words: Sequence[str]) -> int:
    parser = make_parser("inspect", __doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument(
        "--ram",
        action="append",
        metavar="SIZE",
        help="a memory budget to plan for; may be given several times",
    )
    parser.add_argument(
        "--hit", action="append", metavar="PERCENT", help="a hit rate to estimate reads for; likewise"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object; bytes and counts as numbers")
    arguments = parser.parse_args(words)
    from coli_server.models.inspect import HITS, RAMS, inspect_folder

    hits = [_rate(word) for word in arguments.hit] if arguments.hit else HITS
    found = inspect_folder(arguments.folder, arguments.ram or RAMS, hits)
    print(json.dumps(asdict(found), indent=2) if arguments.json else _table(found))
    return 0


def _rate(word: str) -> float:
    try:
        percent = float(word)
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ConfigurationError(f"--hit={word[:40]!r} is not a hit rate (accepted: 0 to 100, in per cent)")
    return percent / 100


def _table(found: Inspection) -> str:
    rows = [
        ("folder", found.folder),
        ("family", found.family),
        ("parameters", f"{_count(found.parameters)}, {_count(found.active_parameters)} of them for a token"),
        ("layers", f"{found.layers}, {found.moe_layers} of them with routed experts"),
        ("experts", f"{found.experts} a layer, {found.experts_per_token} for a token"),
        ("an expert", _size(found.expert_bytes)),
        ("all experts", _size(found.experts_bytes)),
        ("the rest", _size(found.dense_bytes)),
        ("context", f"{found.context_length} tokens"),
        ("KV of a token", _size(found.kv_token_bytes) + _saved(found)),
        ("shards", str(found.shards)),
    ]
    for budget in found.budgets:
        held = f"{budget.slots_per_layer} experts a layer ({budget.share:.0%})"
        context = f"{budget.context_length} tokens of context"
        rows.append((f"--ram {budget.ram}", budget.problem or f"{held}, {context}"))
    rows += [(f"reads at {read.hit:.0%} hits", f"{_size(read.bytes)} a token") for read in found.reads]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _saved(found: Inspection) -> str:
    if found.kv_token_bytes_expanded <= found.kv_token_bytes:
        return ""
    return f" (a latent; keys and values would be {_size(found.kv_token_bytes_expanded)})"


def _count(number: float) -> str:
    for unit in ("", "K", "M", "B", "T"):
        if number < 1000 or unit == "T":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.4g} {unit}"
