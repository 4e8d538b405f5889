"""Clients for a Coli server: blocking (`Client`) and asyncio (`AsyncClient`). Standard library only.

from coli_client import Client

with Client() as client:
    for chunk in client.generate("Once upon a time", max=32):
        print(chunk, end="", flush=True)
"""

from coli_client.aio import AsyncClient, AsyncGeneration
from coli_client.backoff import Backoff, retry
from coli_client.commands import Options
from coli_client.errors import (
    AccessDenied,
    BadOption,
    BadRequest,
    Busy,
    ClientInUse,
    ColiError,
    ConnectionLost,
    ContextExceeded,
    Draining,
    DuplicateId,
    NotFound,
    PayloadTooLarge,
    ProtocolViolation,
    RequestEnded,
    RequestFailed,
    ServerClosed,
    ServerError,
    Timeout,
    TooManyClients,
    TryLater,
)
from coli_client.pool import Pool
from coli_client.results import Ack, Chunk, Info, Logprob, Result, Score, Session, StatLine, Stats, Version
from coli_client.sync import Client, Generation

__all__ = [
    "AccessDenied",
    "Ack",
    "AsyncClient",
    "AsyncGeneration",
    "Backoff",
    "BadOption",
    "BadRequest",
    "Busy",
    "Chunk",
    "Client",
    "ClientInUse",
    "ColiError",
    "ConnectionLost",
    "ContextExceeded",
    "Draining",
    "DuplicateId",
    "Generation",
    "Info",
    "Logprob",
    "NotFound",
    "Options",
    "PayloadTooLarge",
    "Pool",
    "ProtocolViolation",
    "RequestEnded",
    "RequestFailed",
    "Result",
    "Score",
    "ServerClosed",
    "ServerError",
    "Session",
    "StatLine",
    "Stats",
    "Timeout",
    "TooManyClients",
    "TryLater",
    "Version",
    "retry",
]
