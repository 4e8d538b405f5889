"""The root of every error that Coli raises on purpose."""

from typing import ClassVar


class ColiError(Exception):
    """An error with a message for a person and a code from the wire protocol's closed table.

    A subclass sets `code`; the daemon answers `ERR <code> <message>` without looking at the class.
    The message is one line and names the culprit and, where there is one, the accepted range.
    """

    code: ClassVar[str] = "INTERNAL"


class ConfigurationError(ColiError):
    """A setting, an option or a model folder that cannot be used; raised before the port opens."""

    code = "BAD_OPTION"


class ModelError(ColiError):
    """The model's files are missing, broken or not understood, or its arithmetic failed."""

    code = "MODEL"
