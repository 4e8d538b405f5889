"""A daemon of one's own: for one command, on a Unix socket that only its user can open, ended with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import IO

from coli_server.cli.news import News
from coli_server.errors import ColiError
from coli_server.settings import NETWORK, SETTINGS, TOKENS, Address, Listen, given, load

_READY = re.compile(r"READY (\S+)")
_PR_SET_PDEATHSIG = 1
# What is meant for a daemon that others can reach: tokens, certificates, where it listens.
_PUBLIC = {TOKENS, *(setting.env for setting in SETTINGS.values() if setting.group == NETWORK)}
# Longer than a daemon with nothing to do needs; a request that still runs is nobody's any more.
_STOP_SECONDS = 10.0


class DaemonFailedError(ColiError):
    """The private daemon ended before it was ready. It has said why on stderr."""


@contextlib.contextmanager
def private_daemon(flags: Mapping[str, str | None]) -> Iterator[Address]:
    """Run `coli serve` with these flags and this environment until the block is left; gives its address.

    Raises ConfigurationError for settings that are wrong, before anything starts.
    """
    settings = load(flags, os.environ)
    words = {name: word for name in SETTINGS if (word := flags.get(name)) is not None}
    if settings.model is None:
        from coli_server.models import ensure_default_model

        words["model"] = str(ensure_default_model())
    if "log_level" not in given(flags, os.environ):
        words["log_level"] = "warning"
    with tempfile.TemporaryDirectory(prefix="coli-") as folder:
        words["listen"], words["metrics_port"] = f"unix:{folder}/socket", "0"
        process = _start(words)
        try:
            yield _wait_until_ready(process)
        finally:
            _stop(process)


def _start(words: Mapping[str, str]) -> subprocess.Popen[str]:
    arguments = [f"{SETTINGS[name].flag}={word}" for name, word in words.items()]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "coli_server.cli", "serve", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={name: value for name, value in os.environ.items() if name not in _PUBLIC},
        start_new_session=True,  # Ctrl-C is for the command in front, not for its daemon
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    # Linux sends the signal when the parent is gone, however it went.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(process: subprocess.Popen[str]) -> Address:
    assert process.stderr is not None
    ready: SimpleQueue[str | None] = SimpleQueue()
    news = News()
    news.note("loading the model")
    threading.Thread(target=_relay, args=(process.stderr, ready, news), daemon=True).start()
    address = ready.get()
    if address is None:
        raise DaemonFailedError(f"the daemon ended with status {process.wait()} before it was ready")
    return Listen().parse(address)


def _relay(stderr: IO[str], ready: SimpleQueue[str | None], news: News) -> None:
    """Pass the daemon's messages on, but READY; that, or the end of the messages, goes into `ready`."""
    for line in stderr:
        news.wipe()
        match = _READY.match(line)
        if match:
            ready.put(match[1])
        else:
            print(line, end="", file=sys.stderr, flush=True)
    news.wipe()
    ready.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
