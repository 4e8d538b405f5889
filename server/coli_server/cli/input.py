"""What a person says in a chat: lines from the terminal with editing and history, or from a file or pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from coli_server.settings import cache_folder

HISTORY_LINES = 1000
_BLOCK = '"""'


def messages() -> Iterator[str]:
    """Each message as it is complete. At a terminal Ctrl-C forgets what was begun, Ctrl-D ends."""
    if sys.stdin.isatty():
        name = os.environ.get("COLI_CHAT_HISTORY", str(cache_folder() / "chat_history"))
        with _history(Path(name) if name else None):
            yield from joined(_typed)
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 spoils one character, not the talk
    lines = (line.rstrip("\n") for line in sys.stdin)
    yield from joined(lambda _: next(lines, None))


def joined(read: Callable[[bool], str | None]) -> Iterator[str]:
    r"""Messages: a line that ends with `\` goes on in the next one, three quotes begin and end a block.

    `read` is told whether a message goes on, and gives None at the end. KeyboardInterrupt drops a message.
    """
    while True:
        try:
            message = _message(read)
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the conversation)")
            continue
        if message is None:
            return
        yield message


def _message(read: Callable[[bool], str | None]) -> str | None:
    line = read(False)
    if line is None:
        return None
    if line.lstrip().startswith(_BLOCK):
        return _block(line.lstrip().removeprefix(_BLOCK), read)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        following = read(True)
        if following is None:
            break
        lines.append(following)
    return "\n".join(lines)


def _block(first: str, read: Callable[[bool], str | None]) -> str:
    lines: list[str] = []
    line: str | None = first
    while line is not None:
        text, end, _ = line.partition(_BLOCK)
        lines.append(text)
        if end:
            break
        line = read(True)
    return "\n".join(lines).strip("\n")


def _typed(going_on: bool) -> str | None:
    try:
        return input(". " if going_on else "> ")
    except EOFError:
        print()
        return None


@contextlib.contextmanager
def _history(file: Path | None) -> Iterator[None]:
    """Line editing, and what was typed in earlier chats if `file` is given, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if file is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody's talk fails because it cannot be remembered
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # only its owner may read it
            readline.set_history_length(HISTORY_LINES)
            readline.write_history_file(file)
