"""Which experts run: pure functions of arrays that know of no cache, no file and no engine."""

from coli_server.routing.errors import PolicyError, RoutingError, ScoreError
from coli_server.routing.policy import RoutePolicy
from coli_server.routing.select import Selection, select
from coli_server.routing.session import SessionResidency, SpanMean, warm

__all__ = [
    "PolicyError",
    "RoutePolicy",
    "RoutingError",
    "ScoreError",
    "Selection",
    "SessionResidency",
    "SpanMean",
    "select",
    "warm",
]
