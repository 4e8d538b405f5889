"""Show the version of Coli."""

from __future__ import annotations

from collections.abc import Sequence

from coli_server import __version__
from coli_server.cli.arguments import make_parser


def main(words: Sequence[str]) -> int:
    make_parser("version", __doc__).parse_args(words)
    print(f"coli {__version__}")
    return 0
