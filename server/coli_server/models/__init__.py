"""Model folders: the default model is fetched and carved here."""

from coli_server.models.pull import DEFAULT_MODEL, PinnedModel, ensure_default_model
from coli_server.models.source import PullError
from coli_server.settings import cache_folder

__all__ = ["DEFAULT_MODEL", "PinnedModel", "PullError", "cache_folder", "ensure_default_model"]
