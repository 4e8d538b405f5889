"""One answer in the terminal: its text as it comes, then its figures."""

from __future__ import annotations

from collections.abc import Callable

from coli_client import Client, Generation, Info, Result
from coli_server.cli.footer import Hits, footer
from coli_server.cli.news import News


def stream(generation: Generation) -> Result:
    """Print the text of `generation` as it comes. Ctrl-C cancels it; what came so far stays."""
    news = News()
    try:
        for event in generation.events():
            if isinstance(event, Info):
                news.show(event)
            else:
                news.wipe()
                print(event, end="", flush=True)
    except KeyboardInterrupt:
        generation.cancel()
    finally:
        news.wipe()
    return generation.result


def answered(client: Client, start: Callable[[], Generation]) -> tuple[Result, str]:
    """Stream the generation that `start` begins; gives its result and its footer."""
    before = Hits.of(client)
    result = stream(start())
    return result, footer(result, Hits.of(client) - before)
