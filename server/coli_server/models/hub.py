"""Fetch a model repository from the Hugging Face hub, or from whatever HF_ENDPOINT names.

Files go to the hub's own cache, which other programs share. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
mean what they mean to `huggingface_hub`, which also resumes what was interrupted.
"""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import DryRunError
from tqdm import tqdm

from coli_server.models.naming import HUB_ID
from coli_server.models.progress import Progress
from coli_server.models.source import PullError

NEEDED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NEEDED += ["chat_template.jinja", "model.safetensors.index.json", "*.safetensors"]

# Copies of the weights in other layouts: in subfolders, and those that Mistral's own programs read.
NOT_NEEDED = ["*/*", "consolidated*"]


def pull_repository(word: str, *, progress: Progress | None = None) -> Path:
    """The folder with the model files of `owner/name` or `owner/name@revision`, downloaded if need be.

    Without a network, files that are complete in the hub's cache will do. Raises `PullError`.
    """
    progress = progress or Progress.to_stderr()
    match = HUB_ID.fullmatch(word)
    if match is None:
        raise PullError(
            f"{word!r} is no model of the Hugging Face hub, must be OWNER/NAME or OWNER/NAME@REVISION"
        )
    wanted: dict[str, Any] = {
        "repo_id": match["name"],
        "revision": match["revision"],
        "allow_patterns": NEEDED,
        "ignore_patterns": NOT_NEEDED,
    }
    # The library lets the errors of whichever HTTP client it uses pass through, so any exception is its own.
    try:
        files = snapshot_download(**wanted, dry_run=True, tqdm_class=_NoBar)
    except DryRunError:
        progress.say(f"the hub cannot be reached, looking for {word} among what was downloaded before")
    except Exception as error:
        raise PullError(f"{word}: {_reason(error)}") from error
    else:
        _check_files(word, {file.filename for file in files})
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        if missing:
            _check_free_space(word, missing)
            progress.say(f"downloading {word} ({missing / 1e6:.0f} MB) to {constants.HF_HUB_CACHE}")
    try:
        return Path(snapshot_download(**wanted, tqdm_class=None if progress.bars else _NoBar))
    except Exception as error:
        raise PullError(f"{word}: {_reason(error)}") from error


class _NoBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _check_files(word: str, names: set[str]) -> None:
    for required in ("config.json", "tokenizer.json"):
        if required not in names:
            raise PullError(f"{word}: the repository has no {required}")
    if not any(name.endswith(".safetensors") for name in names):
        raise PullError(f"{word}: the repository has no weights in safetensors files")


def _check_free_space(word: str, needed: int) -> None:
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise PullError(
            f"{word}: {free / 1e6:.0f} MB free in {place}, {needed / 1e6:.0f} MB needed; "
            "HF_HOME=FOLDER puts it elsewhere"
        )


def _reason(error: Exception) -> str:
    """The library's explanation as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__
