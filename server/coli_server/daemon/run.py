"""From settings to a serving daemon and back: the one entry point of this package."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

from coli_server.daemon import listening
from coli_server.daemon.figures import Identity
from coli_server.daemon.server import Daemon
from coli_server.engine import Engine
from coli_server.engine.service import EngineService
from coli_server.errors import ConfigurationError
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings, policy_arguments

try:
    from uvloop import new_event_loop
except ImportError:  # not made for every platform
    from asyncio import new_event_loop


def run(settings: Settings) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, and return the process's exit code.

    Prints one line on standard error that begins with READY as soon as it can serve. Raises
    ConfigurationError or ModelError, which name the culprit, when it cannot.
    """
    started = time.monotonic()
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sockets = listening.bind(settings)
    try:
        engine = _open(settings)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(_serve(engine, sockets, settings, started))
        finally:
            engine.close()
    finally:
        listening.unlink(sockets)
        for one in sockets:
            one.close()


def _open(settings: Settings) -> Engine:
    if settings.model is None:
        raise ConfigurationError("COLI_MODEL is not given: it must be the path of a folder with a model")
    return Engine.open(
        settings.model,
        ram=settings.ram,
        experts_per_layer=settings.experts_per_layer,
        policy=RoutePolicy(**policy_arguments(settings)),
        context=settings.context,
        threads=settings.threads or None,
    )


async def _serve(engine: Engine, sockets: list[socket.socket], settings: Settings, started: float) -> int:
    service = EngineService(engine, lambda events: daemon.dispatch(events))
    identity = Identity(engine.name, engine.model_type, started)
    daemon = Daemon(service, engine, identity, settings)
    return await daemon.serve(sockets)
