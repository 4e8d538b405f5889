"""From settings to a serving daemon and back: the one entry point of this package."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from coli_server.daemon import listening
from coli_server.daemon.progress import Progress
from coli_server.daemon.server import Daemon, Signals
from coli_server.engine import Engine
from coli_server.engine.service import EngineService
from coli_server.engine.store import StoreOptions, describe_mode
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings, cache_folder, policy_arguments

try:
    from uvloop import new_event_loop
except ImportError:  # not made for every platform
    from asyncio import new_event_loop


def run(settings: Settings) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, and return the process's exit code.

    Prints one line on standard error that begins with READY as soon as it can serve. Raises
    ConfigurationError or ModelError, which name the culprit, when it cannot. The process ends here if
    the engine cannot be stopped in good order: after a second signal, or if it hangs.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.model is None:
        raise ConfigurationError("COLI_MODEL is not given: it must be the path of a folder with a model")
    sockets = listening.bind(settings)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            code = runner.run(_serve(settings, sockets))
        if code:
            # The engine may be in the middle of a step: Python must not take away what it uses.
            listening.unlink(sockets)
            logging.shutdown()
            os._exit(code)
        return code
    finally:
        listening.unlink(sockets)
        for one in sockets:
            one.close()


async def _serve(settings: Settings, sockets: list[socket.socket]) -> int:
    signals: Signals = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    make_service = partial(EngineService, partial(_open, settings), max_running=settings.max_running)
    daemon = Daemon(make_service, settings)
    starting = asyncio.create_task(daemon.start(sockets))
    interrupted = asyncio.create_task(signals.get())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if interrupted.done():
        return 128 + interrupted.result()
    interrupted.cancel()
    engine = await starting
    place = listening.describe(sockets[0])
    mode = describe_mode(engine.policy, pilot=settings.pilot)
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
        threads=settings.threads or None,
        store=_store(settings),
        progress=Progress("pinning experts"),
        warm=False,  # the service compiles the kernels on its own thread
    )


def _store(settings: Settings) -> StoreOptions:
    history = str(cache_folder() / "history") if settings.history is None else settings.history
    return StoreOptions(
        pilot=settings.pilot,
        history=None if history == "off" else Path(history),
        pin=settings.pin,
        pin_ram=settings.pin_ram,
    )
