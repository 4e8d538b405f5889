"""What can go wrong in routing: a setting out of range, or scores that no expert can be chosen from."""

from coli_server.errors import ColiError, ConfigurationError, ModelError


class RoutingError(ColiError):
    """The root of routing's errors."""


class PolicyError(RoutingError, ConfigurationError):
    """A routing setting is out of range; the message names the setting, its value and the range."""

    code = "BAD_OPTION"


class ScoreError(RoutingError, ModelError):
    """A router's output cannot be ranked: not finite, or fewer than K unmasked experts.

    `token` is the row of the offending token; `expert` the offending expert, or None when the row as a
    whole is at fault.
    """

    code = "MODEL"

    def __init__(self, message: str, token: int, expert: int | None = None) -> None:
        super().__init__(message)
        self.token = token
        self.expert = expert
