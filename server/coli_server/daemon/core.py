"""What all connections of a daemon share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coli_server.daemon.dialogues import Dialogues
from coli_server.daemon.figures import Figures
from coli_server.daemon.meters import Meters
from coli_server.daemon.prompts import Prompts
from coli_server.daemon.scheduler import Scheduler
from coli_server.daemon.sessions import Sessions
from coli_server.daemon.tokens import Tokens
from coli_server.settings import Settings


@dataclass(frozen=True, slots=True)
class Core:
    """The parts of a daemon that a connection works with. `options` are the daemon's own defaults."""

    settings: Settings
    options: Mapping[str, Any]
    tokens: Tokens
    sessions: Sessions
    dialogues: Dialogues
    scheduler: Scheduler
    prompts: Prompts
    figures: Figures
    meters: Meters
