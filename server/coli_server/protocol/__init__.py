"""The line protocol without I/O: bytes to commands, replies to bytes.

    framer = Framer()
    for event in framer.feed(data):      # Command, or ProtocolError
        ...

`replies` has a function for every line that the server sends. Imports neither asyncio nor numpy.
"""

from coli_server.protocol import replies
from coli_server.protocol.commands import Command, ScoreText
from coli_server.protocol.errors import CODES, CodeInfo, ErrorCode, ProtocolError
from coli_server.protocol.framer import DEFAULT_PAYLOAD, MAX_LINE, MAX_PAYLOAD, Event, Framer, Limits, Pending
from coli_server.protocol.options import DEFAULTS, OPTIONS, SETTABLE, Option, OptionValue, is_identifier
from coli_server.protocol.replies import Routing, Summary
from coli_server.protocol.verbs import STAT_SECTIONS, VERBS, Verb

__all__ = [
    "CODES",
    "DEFAULTS",
    "DEFAULT_PAYLOAD",
    "MAX_LINE",
    "MAX_PAYLOAD",
    "OPTIONS",
    "SETTABLE",
    "STAT_SECTIONS",
    "VERBS",
    "CodeInfo",
    "Command",
    "ErrorCode",
    "Event",
    "Framer",
    "Limits",
    "Option",
    "OptionValue",
    "Pending",
    "ProtocolError",
    "Routing",
    "ScoreText",
    "Summary",
    "Verb",
    "is_identifier",
    "replies",
]
