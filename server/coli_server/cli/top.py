"""Watch a running daemon: speed, routing, sessions, memory. q ends it; the keys below the table sort it.

It goes on over restarts of the daemon. `coli stat --watch` writes lines instead, for files and pipes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from coli_server.cli.arguments import add_connect_argument, client_of, daemon_address, make_parser
from coli_server.cli.top_view import View
from coli_server.cli.watch import News, Watcher
from coli_server.errors import ConfigurationError
from coli_server.ranges import NumberRange

_INTERVAL = NumberRange(0.1, 3600)


def main(words: Sequence[str]) -> int:
    parser = make_parser("top", __doc__)
    parser.add_argument("--interval", metavar="SECONDS", default="1", help="time between two looks (1)")
    add_connect_argument(parser)
    arguments = parser.parse_args(words)
    try:
        interval = float(_INTERVAL.parse(arguments.interval))
    except ValueError:
        raise ConfigurationError(f"--interval is {arguments.interval!r}, must be {_INTERVAL}") from None
    address = daemon_address(arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("coli top needs a terminal; coli stat --watch writes lines")
    news: SimpleQueue[News] = SimpleQueue()
    with _bell() as (ring, heard):

        def tell(one: News) -> None:
            news.put(one)
            ring()

        watcher = Watcher(lambda: client_of(address), interval, tell)
        watcher.start()
        try:
            _show(View(str(address)), news, heard)
        finally:
            watcher.stop()
    return 0


def _show(view: View, news: SimpleQueue[News], heard: int) -> None:
    """Draw whenever there is news, a key or another size, until q is pressed."""
    console = Console()
    keyboard = sys.stdin.fileno()
    with _single_keys(keyboard), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            # Asked for each time: COLUMNS and LINES, which rich believes, do not follow a resize.
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(columns, lines)
            live.update(view.render(columns, lines), refresh=True)
            ready, _, _ = select.select([keyboard, heard], [], [])
            if heard in ready:
                os.read(heard, 4096)
            if keyboard in ready:
                keys = os.read(keyboard, 64).decode("ascii", "replace")
                if not keys or "q" in keys:
                    return
                for key in keys:
                    view.press(key)
            with contextlib.suppress(Empty):
                while True:
                    view.take(news.get_nowait())


@contextlib.contextmanager
def _bell() -> Iterator[tuple[Callable[[], None], int]]:
    """A function that wakes up whoever waits for the descriptor; a new size of the terminal does, too."""
    heard, rung = os.pipe()
    os.set_blocking(rung, False)

    def ring() -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(rung, b"\0")

    before = signal.signal(signal.SIGWINCH, lambda *_: ring())
    try:
        yield ring, heard
    finally:
        # The pipe stays open: the watcher may be about to ring for the last time.
        signal.signal(signal.SIGWINCH, before)


@contextlib.contextmanager
def _single_keys(terminal: int) -> Iterator[None]:
    """Keys come at once and are not shown; Ctrl-C still interrupts."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
