"""Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation; /help shows what else there is.

Under each answer stands what it cost: tokens, tokens per second, share of expert lookups that were hits
(pinned, in the LRU), experts swapped by cache-aware routing, and how close that stayed to the model's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coli_client import Client, ServerClosed, ServerError
from coli_server.cli.answer import answered
from coli_server.cli.arguments import (
    add_request_arguments,
    make_parser,
    option_value,
    refusals,
    request_options,
)
from coli_server.cli.attach import add_daemon_arguments, attached
from coli_server.cli.input import messages
from coli_server.errors import ConfigurationError

# Options that a session cannot have: they go with each turn from then on.
_PER_REQUEST = ("seed", "deadline_ms")

_HELP = """\
/set OPTION VALUE   change an option of this session: temp, max, system, cache_route, route_j, ...
/stat [SECTION]     figures: session (default), all, server, route, cache, latency, settings
/reset              forget this conversation
/quit               leave (also Ctrl-D)
A line that begins with // is said with one / less. A line that ends with \\ goes on in the next one;
three quotes (\"\"\") begin and end a message of several lines. The arrow keys find what was typed before."""


def main(words: Sequence[str]) -> int:
    parser = make_parser("chat", __doc__)
    parser.add_argument("--system", metavar="TEXT", help="tell the model beforehand how to answer")
    add_request_arguments(parser)
    add_daemon_arguments(parser)
    arguments = parser.parse_args(words)
    options = request_options(arguments)
    with attached(arguments) as client:
        if arguments.system is not None:
            with refusals():
                client.set("system", arguments.system)
        Chat(client, options).run(messages())
    return 0


class Chat:
    """A conversation in one session. `options` go with every turn, until `/set` changes one of them."""

    def __init__(self, client: Client, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = dict(options)

    def run(self, messages: Iterator[str]) -> None:
        """Answer each message until they end, somebody says /quit, or the connection is lost."""
        for message in messages:
            text = message.strip()
            if text == "/quit":
                return
            if text:
                self._take(text)

    def _take(self, text: str) -> None:
        """Answer one message. What is wrong with it alone is told; a lost connection is raised."""
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._obey(*text.split(maxsplit=2))
            else:
                self._turn(text.removeprefix("/") if text.startswith("//") else text)
        except ServerClosed:
            raise
        except (ServerError, ConfigurationError, TypeError, ValueError) as error:
            print(f"! {error}")
        except KeyboardInterrupt:
            print("(cancelled)")

    def _turn(self, text: str) -> None:
        result, figures = answered(self._client, lambda: self._client.chat(text, **self._options))
        print(" (cancelled)" if result.finish == "cancelled" else "")
        print(figures)

    def _obey(self, command: str, *words: str) -> None:
        match command, words:
            case "/set", (name, word):
                self._set(name, word)
            case "/stat", (*section,):
                for name, value in self._client.stat(*(section or ["session"])).items():
                    print(f"{name} {value}")
            case "/reset", ():
                self._client.reset()
                print("(forgotten)")
            case "/help", ():
                print(_HELP)
            case _:
                raise ConfigurationError(
                    f"{' '.join((command, *words))!r} is no command; /help shows them all"
                )

    def _set(self, name: str, word: str) -> None:
        value = option_value(name, word, "/set")
        if name in _PER_REQUEST:
            self._options[name] = value
        else:
            self._client.set(name, value)
            self._options.pop(name, None)  # what a flag said is over
