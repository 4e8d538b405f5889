"""From settings to a serving daemon and back: the one entry point of this package."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coli_server.daemon import listening, logs, metrics
from coli_server.daemon.collector import settle
from coli_server.daemon.descriptors import raise_descriptor_limit
from coli_server.daemon.progress import Progress
from coli_server.daemon.server import Daemon, MakeService, Signals
from coli_server.daemon.slices import take_short_turns
from coli_server.daemon.supervisor import Notifier, inherited_sockets
from coli_server.daemon.tls import load_certificate, server_context
from coli_server.daemon.tokens import Tokens, load_tokens
from coli_server.engine import Engine
from coli_server.engine.memory import default_ram
from coli_server.engine.service import EngineService
from coli_server.engine.store import StoreOptions, describe_mode
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings, cache_folder, policy_arguments

try:
    from uvloop import new_event_loop
except ImportError:  # not made for every platform
    from asyncio import new_event_loop

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and the words of the variable COLI_TOKENS, which is none of them."""

    settings: Settings
    tokens: str = ""

    def load_tokens(self) -> Tokens:
        return load_tokens(self.settings.token_file, self.tokens)


def run(configure: Callable[[], Configuration]) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, and return the process's exit code.

    `configure` reads the configuration; on SIGHUP it does so again, and tokens, certificate and log level
    are taken from it. Prints one line on standard error that begins with READY as soon as it can serve.
    Raises ConfigurationError or ModelError, which name the culprit, when it cannot. The process ends here
    if the engine cannot be stopped in good order: after a second signal, or if it hangs.
    """
    configuration = configure()
    settings = configuration.settings
    logs.set_up(settings.log_level, settings.log_format)
    if settings.model is None:
        raise ConfigurationError("COLI_MODEL is not given: it must be the path of a folder with a model")
    if settings.ram is None:
        settings = replace(settings, ram=default_ram())
    tokens, tls, notifier = configuration.load_tokens(), server_context(settings), Notifier(os.environ)
    raise_descriptor_limit(settings.max_connections)
    inherited = inherited_sockets(os.environ)
    ours = [] if inherited else listening.bind(settings)
    watched = metrics.bind(settings)
    try:
        listening.check_reach(inherited or ours, settings, tokens=bool(tokens))
        daemon = partial(Daemon, settings=settings, tokens=tokens, tls=tls, notifier=notifier)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            code = runner.run(
                _serve(
                    settings, inherited or ours, watched, daemon, Reload(configure, settings, tls), notifier
                )
            )
        if code:
            # The engine may be in the middle of a step: Python must not take away what it uses.
            listening.unlink(ours)
            logging.shutdown()
            os._exit(code)
        return code
    finally:
        listening.unlink(ours)
        for one in [*(inherited or ours), *watched]:
            one.close()


@dataclass(frozen=True, slots=True)
class Reload:
    """What SIGHUP does: the new log level, tokens and certificate count, or all of the old ones stay."""

    configure: Callable[[], Configuration]
    settings: Settings
    tls: ssl.SSLContext | None

    def __call__(self, daemon: Daemon) -> None:
        try:
            configuration = self.configure()
            tokens = configuration.load_tokens()
            if self.tls is not None:
                load_certificate(self.tls, self.settings)
        except ConfigurationError as error:
            log.error("not read again: %s", error)
            return
        daemon.reload(tokens)
        logs.set_level(configuration.settings.log_level)
        log.info("tokens, certificate and log level are read again")


async def _serve(
    settings: Settings,
    sockets: list[socket.socket],
    watched: list[socket.socket],
    make_daemon: Callable[[MakeService], Daemon],
    reload: Reload,
    notifier: Notifier,
) -> int:
    signals: Signals = asyncio.Queue()
    stopping = [signal.SIGTERM, signal.SIGINT]
    if os.isatty(0):  # the terminal is closed: nobody is there any more to stop the daemon
        stopping.append(signal.SIGHUP)
    for number in stopping:
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    make_service = partial(EngineService, partial(_open, settings), max_running=settings.max_running)
    daemon = make_daemon(make_service)
    if signal.SIGHUP not in stopping:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload, daemon)
    port = metrics.MetricsPort(daemon.health, daemon.metrics)
    await port.start(watched)
    try:
        return await _serve_until_signal(settings, sockets, daemon, signals, notifier)
    finally:
        port.close()


async def _serve_until_signal(
    settings: Settings,
    sockets: list[socket.socket],
    daemon: Daemon,
    signals: Signals,
    notifier: Notifier,
) -> int:
    starting = asyncio.create_task(daemon.start(sockets))
    interrupted = asyncio.create_task(signals.get())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if interrupted.done():
        return 0  # nothing runs yet, so nothing is cut short
    interrupted.cancel()
    engine = await starting
    log.debug("%d objects stay as long as the process", settle())
    log.debug("short turns of the event loop: %s", "accepted" if take_short_turns() else "refused")
    place = listening.describe(sockets[0])
    mode = describe_mode(engine.policy, pilot=settings.pilot, activations=settings.activations)
    notifier.ready(f"serving {engine.name} on {place}, {mode}")
    print(f"READY {place} model={engine.name} mode={mode}", file=sys.stderr, flush=True)
    return await daemon.until(signals)


def _open(settings: Settings) -> Engine:
    assert settings.model is not None
    return Engine.open(
        settings.model,
        ram=settings.ram,
        experts_per_layer=settings.experts_per_layer,
        policy=RoutePolicy(**policy_arguments(settings)),
        context=settings.context,
        kv_ram=settings.kv_ram,
        threads=settings.threads or None,
        activations=settings.activations,
        store=_store(settings),
        progress=Progress("pinning experts"),
        warm=False,  # the service compiles the kernels on its own thread
    )


def _store(settings: Settings) -> StoreOptions:
    history = str(cache_folder() / "history") if settings.history is None else settings.history
    return StoreOptions(
        pilot=settings.pilot,
        readers=settings.readers,
        direct=settings.direct,
        mirror=None if settings.mirror is None else Path(settings.mirror),
        evict=settings.evict,
        trace=None if settings.trace is None else Path(settings.trace),
        history=None if history == "off" else Path(history),
        pin=settings.pin,
        pin_ram=settings.pin_ram,
    )
