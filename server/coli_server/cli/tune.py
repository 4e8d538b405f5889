"""`coli tune`: choose a routing policy by measuring."""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    from coli_server.bench import tune

    return tune.main(words)
