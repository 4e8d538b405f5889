"""Who may use the daemon: tokens, from a file and from the environment.

An entry is `NAME=TOKEN`; entries stand between blanks or on lines of their own, and `#` begins a comment in a
file. Tokens of the same name are the same owner, so a new one can be given out before the old one is taken
back. The name `admin` may see the figures of all.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coli_server.errors import ConfigurationError
from coli_server.settings import TOKENS

log = logging.getLogger(__name__)

ADMIN = "admin"

# No `=`: the words of a command line that have one are options.
_ENTRY = re.compile(r"([A-Za-z0-9._-]{1,64})=([A-Za-z0-9._~+/-]{16,256})", re.ASCII)
_RULE = "NAME=TOKEN, the token 16 to 256 of letters, digits and -._~+/"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a token belongs to. `digest` tells tokens of one owner apart without holding them."""

    owner: str
    digest: bytes

    @property
    def admin(self) -> bool:
        return self.owner == ADMIN


class Tokens:
    """The tokens that count now. Only their digests are kept."""

    def __init__(self, identities: tuple[Identity, ...] = ()) -> None:
        self._identities = identities

    def __bool__(self) -> bool:
        """Whether clients must have a token."""
        return bool(self._identities)

    def identify(self, token: str) -> Identity | None:
        """The owner of `token`. Takes the same time for every token of the same length."""
        digest, found = _digest(token), None
        for identity in self._identities:
            if hmac.compare_digest(identity.digest, digest):
                found = identity
        return found

    def valid(self, identity: Identity | None) -> bool:
        """Whether a client that was identified so may still go on."""
        return not self._identities or identity in self._identities

    def replace(self, other: Tokens) -> None:
        """Let the tokens of `other` count from now on."""
        self._identities = other._identities


def load_tokens(file: str | None, words: str) -> Tokens:
    """The tokens of a file and of the variable's `words`.

    Raises ConfigurationError naming the file and line, never a token.
    """
    entries = list(_entries(words, TOKENS))
    if file is not None:
        entries += _file_entries(file)
    return Tokens(tuple(Identity(name, _digest(token)) for name, token in entries))


def _file_entries(file: str) -> Iterator[tuple[str, str]]:
    path = Path(file)
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigurationError(f"COLI_TOKEN_FILE is {file!r}: {reason}") from None
    if stat.S_ISREG(mode) and mode & 0o077 and path.stat().st_uid == os.geteuid():
        log.warning("%s can be read by others than its owner: chmod 600 it", file)
    found = False
    for number, line in enumerate(lines, 1):
        for entry in _entries(line.partition("#")[0], f"{file}, line {number}"):
            found = True
            yield entry
    if not found:
        raise ConfigurationError(f"COLI_TOKEN_FILE is {file!r}: there is no token in it")


def _entries(words: str, where: str) -> Iterator[tuple[str, str]]:
    for word in words.split():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise ConfigurationError(f"{where}: an entry must be {_RULE}")
        yield match[1], match[2]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
