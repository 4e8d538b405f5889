"""Continue one text. The continuation goes to standard output, its figures to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from coli_client import Generation
from coli_server.cli.answer import answered
from coli_server.cli.arguments import add_request_arguments, make_parser, refusals, request_options
from coli_server.cli.attach import add_daemon_arguments, attached
from coli_server.ranges import FLAG
from coli_server.settings import SETTINGS

_SWITCHES = frozenset(setting.flag for setting in SETTINGS.values() if setting.accepts is FLAG)


def main(words: Sequence[str]) -> int:
    parser = make_parser("gen", __doc__)
    parser.add_argument("prompt", help="the text; - reads it from standard input, without its last line end")
    add_request_arguments(parser)
    add_daemon_arguments(parser)
    arguments = parser.parse_args(_spelled_out(words))
    options = request_options(arguments)
    with refusals():
        prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt == "-" else arguments.prompt

    def start() -> Generation:
        with refusals():
            return client.generate(prompt, **options)

    with attached(arguments) as client:
        result, figures = answered(client, start)
    print()
    print(figures, file=sys.stderr)
    return 130 if result.finish == "cancelled" else 0


def _spelled_out(words: Sequence[str]) -> list[str]:
    """A switch without a value must not take the prompt after it for its value: write `=1` behind it."""
    following = [*words, None][1:]
    return [
        f"{word}=1" if word in _SWITCHES and after not in FLAG.words else word
        for word, after in zip(words, following, strict=True)
    ]
