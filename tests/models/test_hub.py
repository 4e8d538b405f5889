"""Pulling a repository, against a small server that speaks the hub's file API."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coli_server.engine import Engine
from coli_server.models import model_folder
from coli_server.models.checkpoint import write_model
from coli_server.models.dense import read_gguf
from coli_server.models.naming import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """The repository `owner/tiny`; `private` demands the token, `cut` names a file that ends half way."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.private = False
        self.cut: str | None = None
        self.sent: list[tuple[str, int, int]] = []
        """(file, first byte, bytes) of every download."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif re.fullmatch(rf"/api/models/owner/tiny(/revision/(main|v1|{COMMIT}))?", path):
            names = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "owner/tiny", "sha": COMMIT, "siblings": names}, body)
        elif path.startswith("/api/models/owner/tiny/tree/"):
            files = self.server.files.items()
            self._json([{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files], body)
        elif path.startswith("/api/models/owner/tiny/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        elif match := re.fullmatch(rf"/owner/tiny/resolve/{COMMIT}/(.+)", path):
            self._file(match[1], body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _file(self, name: str, body: bool) -> None:
        content = self.server.files[name]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        part = content[first:]
        if body and self.server.cut == name:
            half = part[: len(part) // 2]
            self.server.sent.append((name, first, len(half)))
            self._send(200, half, headers | {"Content-Length": str(len(part))}, body)
            self.close_connection = True
            return
        if body:
            self.server.sent.append((name, first, len(part)))
        self._send(206 if first else 200, part, headers, body)

    def _json(self, content: Any, body: bool) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tiny: Any, tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    write_model(folder, read_gguf(tiny.gguf), tiny.recipe, lambda: None)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {
        "README.md": b"# Tiny",
        "original/consolidated.safetensors": b"x" * 1000,
        "model.bin": b"y" * 1000,
    }
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


_CHILD = """
import sys
from coli_server.errors import ColiError
from coli_server.engine import Engine
from coli_server.models import model_folder
try:
    print(model_folder(sys.argv[1]))
except ColiError as error:
    sys.exit(f"refused: {error}")
"""


def _pull(
    hub: Hub, home: Path, word: str = "owner/tiny", **environment: str
) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the hub's library reads its variables when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, "-c", _CHILD, word],
        env=inherited | settings | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_needed_files_come_and_no_others(hub: Hub, tmp_path: Path) -> None:
    done = _pull(hub, tmp_path / "home")
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home"), done.stderr
    wanted = hub.files.keys() - {"README.md", "original/consolidated.safetensors", "model.bin"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert all((folder / name).read_bytes() == hub.files[name] for name in wanted)


def test_progress_is_one_plain_line_when_stderr_is_no_terminal(hub: Hub, tmp_path: Path) -> None:
    assert re.fullmatch(r"coli: downloading owner/tiny \(\d+ MB\) to \S+\n", _pull(hub, tmp_path).stderr)


def test_a_second_pull_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    first = _pull(hub, tmp_path)
    hub.sent.clear()
    assert _pull(hub, tmp_path).stdout == first.stdout
    assert hub.sent == []


def test_after_an_interruption_only_what_is_missing_comes(hub: Hub, tmp_path: Path) -> None:
    shard = next(name for name in hub.files if name.startswith("model-") and name.endswith(".safetensors"))
    hub.cut = shard
    assert "refused: owner/tiny: " in _pull(hub, tmp_path).stderr
    finished = {name for name, first, count in hub.sent if first + count == len(hub.files[name])}
    assert shard not in finished
    hub.cut = None
    hub.sent.clear()
    folder = Path(_pull(hub, tmp_path).stdout.strip())
    assert (folder / shard).read_bytes() == hub.files[shard]
    again = {name for name, _, _ in hub.sent}
    assert shard in again
    assert not finished & again


def test_what_was_downloaded_serves_without_a_network(hub: Hub, tmp_path: Path) -> None:
    first = _pull(hub, tmp_path)
    gone = _pull(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.stdout == first.stdout
    assert "cannot be reached" in gone.stderr


def test_without_a_network_and_without_files_the_reason_is_one_line(hub: Hub, tmp_path: Path) -> None:
    gone = _pull(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.returncode == 1
    assert gone.stderr.splitlines()[-1].startswith("refused: owner/tiny: ")


def test_a_revision_can_be_pinned(hub: Hub, tmp_path: Path) -> None:
    assert COMMIT in _pull(hub, tmp_path, f"owner/tiny@{COMMIT}").stdout
    assert "refused: owner/tiny@v9" in _pull(hub, tmp_path, "owner/tiny@v9").stderr


def test_a_private_repository_needs_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.private = True
    assert "refused: owner/tiny" in _pull(hub, tmp_path).stderr
    assert COMMIT in _pull(hub, tmp_path, HF_TOKEN=TOKEN).stdout


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "safetensors"])
def test_a_repository_that_cannot_run_is_refused_before_its_weights_come(
    hub: Hub, tmp_path: Path, missing: str
) -> None:
    for name in [name for name in hub.files if name.endswith(missing)]:
        del hub.files[name]
    assert f"no {missing}" in (error := _pull(hub, tmp_path).stderr) or "no weights" in error
    assert hub.sent == []


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("owner/name", True),
        ("owner/name@main", True),
        ("owner/name.v1@refs/pr/3", True),
        ("/absolute/path", False),
        ("./here/it", False),
        ("../folder", False),
        ("./folder", False),
        ("name", False),
        ("a/b/c", False),
    ],
)
def test_what_a_hub_id_looks_like(word: str, answer: bool) -> None:
    assert is_hub_id(word) == answer


def test_a_folder_that_is_here_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("owner/name")


def test_a_folder_is_given_back_as_it_is(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder("/no/such/folder") == Path("/no/such/folder")


def test_without_a_name_it_is_the_default_model(default_model: Path) -> None:
    assert model_folder(None) == default_model


def test_the_engine_runs_what_was_pulled(hub: Hub, tmp_path: Path) -> None:
    engine = Engine.open(_pull(hub, tmp_path / "home").stdout.strip(), warm=False)
    local = Engine.open(tmp_path / "repository", warm=False)
    assert engine.generate([5, 6, 7], 4, ignore_eos=True) == local.generate([5, 6, 7], 4, ignore_eos=True)
    engine.close()
    local.close()
