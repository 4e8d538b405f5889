"""The dialogues of named sessions on disk, so that they survive a restart. Off unless `--session-dir` is set.

One JSON file a session, for its owner alone, replaced as a whole: after a crash there is the old one or the
new one. A file that is damaged is left alone and told of in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli_server.daemon.meters import Meters
from coli_server.daemon.sessions import Message, Session, Sessions
from coli_server.errors import ConfigurationError
from coli_server.protocol import SETTABLE, is_identifier

log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """A session as it was kept; `age` is the seconds since it was last used."""

    name: str
    owner: str | None
    age: float
    dialogue: list[Message]
    options: dict[str, Any]


class Dialogues:
    """Saves and forgets sessions in `folder`, away from the event loop and in order; idle without one."""

    def __init__(self, folder: str | None, executor: Executor, meters: Meters) -> None:
        self._folder = None if folder is None else Path(folder)
        self._executor = executor
        self._meters = meters
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self) -> list[Saved]:
        """What was kept, the latest used first. Raises ConfigurationError when others may read the folder."""
        if self._folder is None:
            return []
        _make_private(self._folder)
        return sorted(_read_all(self._folder), key=lambda saved: saved.age)

    def restore(self, sessions: Sessions, now: float) -> None:
        """Bring the kept sessions back at `now`, the latest used first, while there is room."""
        kept = self.load()
        back = [s for s in kept if sessions.restore(s.name, s.owner, now - s.age, s.dialogue, s.options)]
        if kept:
            log.info("%d of %d kept sessions are back", len(back), len(kept))

    async def save(self, session: Session) -> None:
        """Keep a named session as it is now. A failure is logged and counted: the dialogue itself goes on."""
        if self._folder is not None and not session.anonymous:
            await self._write(self._folder / f"{session.name}.json", _encode(session))

    def forget(self, session: Session) -> None:
        """Remove what is kept of a session that has ended."""
        if self._folder is not None and not session.anonymous:
            task = asyncio.create_task(self._write(self._folder / f"{session.name}.json", None))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(self, path: Path, data: bytes | None) -> None:
        async with self._order:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._executor, _replace, path, data)
            except OSError as error:
                self._meters.sessions_unsaved_total += 1
                log.error("session %s is not kept on disk: %s", path.stem, error.strerror)


def _encode(session: Session) -> bytes:
    entry = {
        "format": _FORMAT,
        "name": session.name,
        "owner": session.owner,
        "used": time.time(),
        "dialogue": session.dialogue,
        "options": session.options,
    }
    return json.dumps(entry, ensure_ascii=False).encode()


def _replace(path: Path, data: bytes | None) -> None:
    """Put `data` in the place of `path` at once, or remove it."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(0, "it cannot be written")
    except OSError as error:
        raise ConfigurationError(f"COLI_SESSION_DIR is {str(folder)!r}: {error.strerror}") from None
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"COLI_SESSION_DIR is {str(folder)!r}: it must be its owner's alone (chmod 700)"
        )


def _read_all(folder: Path) -> Iterator[Saved]:
    for path in sorted(folder.glob("*.json")):
        try:
            saved = _decode(json.loads(path.read_bytes()), time.time())
            if saved.name != path.stem:
                raise ValueError("its name is not that of the file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.error("%s is no kept session and is left alone: %s", path, error)
        else:
            yield saved


def _decode(entry: Any, now: float) -> Saved:
    if entry["format"] != _FORMAT:
        raise ValueError(f"format {entry['format']!r}")
    name, owner, dialogue = entry["name"], entry["owner"], entry["dialogue"]
    if not (is_identifier(name) and (owner is None or is_identifier(owner))):
        raise ValueError("its name or owner is malformed")
    for message in dialogue:
        if message.keys() != {"role", "content"} or not all(
            isinstance(text, str) for text in message.values()
        ):
            raise ValueError("a message is malformed")
    options = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in entry["options"].items()
        if option in SETTABLE
    }
    return Saved(name, owner, max(0.0, now - float(entry["used"])), dialogue, options)
