"""Model folders: the default model is fetched and carved here, others come from the Hugging Face hub."""

from pathlib import Path

from coli_server.models.naming import is_hub_id
from coli_server.models.pull import DEFAULT_MODEL, PinnedModel, ensure_default_model
from coli_server.models.source import PullError
from coli_server.settings import cache_folder

__all__ = [
    "DEFAULT_MODEL",
    "PinnedModel",
    "PullError",
    "cache_folder",
    "ensure_default_model",
    "model_folder",
]


def model_folder(word: str | None) -> Path:
    """The folder of the model that `word` names, fetched first if need be.

    Nothing: the default model. `owner/name` or `owner/name@revision`, unless such a folder is here: a model
    of the Hugging Face hub. Anything else is a folder, and returned unseen. Raises `PullError`.
    """
    if word is None:
        return ensure_default_model()
    if not is_hub_id(word):
        return Path(word)
    # Imported late: the hub's library takes longer to load than most commands take to run.
    from coli_server.models.hub import pull_repository

    return pull_repository(word)
