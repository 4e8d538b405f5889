"""Store a model's weights in 16, 8 or 4 bits, each expert in one piece that one read fetches.

The new folder is used like any other one. Broken off, the same command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from coli_server.cli.arguments import make_parser


def main(words: Sequence[str]) -> int:
    parser = make_parser("convert", __doc__)
    parser.add_argument("folder", type=Path, help="a model folder")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--bits", type=int, required=True, metavar="16|8|4", help="of the routed experts")
    parser.add_argument(
        "--dense", type=int, metavar="16|8", help="of the other matrices (16 beside --bits 16, else 8)"
    )
    parser.add_argument(
        "--group", type=int, default=32, metavar="N", help="weights that share a scale: 32, 64 or 128 (32)"
    )
    arguments = parser.parse_args(words)
    from coli_server.models.convert import Conversion, convert
    from coli_server.models.progress import Progress

    conversion = Conversion(arguments.bits, arguments.dense, arguments.group)
    bar = partial(Progress.to_stderr().bar, f"converting to {arguments.bits} bits")
    convert(arguments.folder, arguments.out, conversion, bar)
    print(arguments.out)
    return 0
