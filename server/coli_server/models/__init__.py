"""Model folders: the default model is fetched and carved here."""

from coli_server.models.pull import DEFAULT_MODEL, PinnedModel, cache_folder, ensure_default_model
from coli_server.models.source import PullError

__all__ = ["DEFAULT_MODEL", "PinnedModel", "PullError", "cache_folder", "ensure_default_model"]
