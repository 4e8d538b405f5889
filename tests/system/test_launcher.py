"""The launcher, in a small project of its own that installs without a network, by real venv and real pip."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "coli"
version = "1"
"""

# A build backend of a few lines: an editable wheel is a .pth file and three lines of metadata.
BACKEND = """
import os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "coli-1.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: coli\\nVersion: 1\\n"
    metadata += "Provides-Extra: server\\nProvides-Extra: dev\\n"
    files = {
        "coli.pth": os.getcwd(),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, "coli-1-py3-none-any.whl"), "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
    return "coli-1-py3-none-any.whl"
"""

# A file `json.py` stands in the folder that the tests start from: it must not be taken for the module.
MAIN = """
import json, sys
print(json.dumps(sys.argv[1:]), getattr(json, "trap", "json"))
"""


@dataclass(frozen=True)
class Project:
    root: Path
    elsewhere: Path

    def start(self, *words: str, command: Path | str | None = None, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(command or self.root / "coli"), *words],
            cwd=self.elsewhere,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, command: Path | str | None = None, **env: str) -> tuple[int, str, str]:
        process = self.start(*words, command=command, **env)
        out, err = process.communicate()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def first_starts(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Project, list[tuple[int | None, str, str]]]:
    """A project after its very first start, which was two starts at once."""
    root = tmp_path_factory.mktemp("with blank") / "project"
    (root / "coli_server").mkdir(parents=True)
    shutil.copy(ROOT / "coli", root / "coli")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "coli_server/cli.py").write_text(MAIN)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "json.py").write_text("trap = 'trap'\ndumps = repr\n")
    project = Project(root, elsewhere)
    processes = [project.start("version", word) for word in ("one", "two words")]
    outputs = [process.communicate() for process in processes]
    return project, [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.fixture
def project(first_starts: tuple[Project, object]) -> Project:
    return first_starts[0]


def test_two_first_starts_at_once_install_once_and_both_run(
    first_starts: tuple[Project, list[tuple[int | None, str, str]]],
) -> None:
    _, ends = first_starts
    assert [end[:2] for end in ends] == [
        (0, '["version", "one"] json\n'),
        (0, '["version", "two words"] json\n'),
    ]
    assert sorted(err.count("making") for _, _, err in ends) == [0, 1]
    assert sorted(err.count("installing") for _, _, err in ends) == [0, 1]


def test_a_later_start_says_nothing_and_installs_nothing(project: Project) -> None:
    assert project.run("stat") == (0, '["stat"] json\n', "")


def test_it_works_through_symbolic_links_and_from_any_folder(project: Project, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/absolute").symlink_to(project.root / "coli")
    (tmp_path / "bin/relative").symlink_to("absolute")
    for link in ("absolute", "relative"):
        assert project.run("version", command=tmp_path / "bin" / link) == (0, '["version"] json\n', "")
    shell = subprocess.run(["sh", "coli", "version"], cwd=project.root, capture_output=True, text=True)
    assert shell.stdout == '["version"] json\n'
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert project.run("version", command="relative", PATH=path) == (0, '["version"] json\n', "")


def test_a_command_that_needs_more_installs_it_once(project: Project) -> None:
    status, out, err = project.run("serve", "--route-j", "1")
    assert (status, out) == (0, '["serve", "--route-j", "1"] json\n')
    assert "installing coli[server]" in err
    assert project.run("chat") == (0, '["chat"] json\n', "")
    # What is installed stays: a command that needs less installs nothing.
    assert project.run("version") == (0, '["version"] json\n', "")


def test_chat_with_a_running_daemon_needs_no_server(project: Project) -> None:
    level = (project.root / ".venv/.coli").read_text()
    (project.root / ".venv/.coli").write_text("0" + level[1:])
    assert project.run("chat", "--connect", "7311") == (0, '["chat", "--connect", "7311"] json\n', "")


def test_a_changed_pyproject_is_installed_again(project: Project) -> None:
    with (project.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    status, _, err = project.run("version")
    assert status == 0
    assert "installing coli" in err
    assert "making" not in err
    assert project.run("version")[2] == ""


def test_an_interrupted_install_is_made_anew(project: Project) -> None:
    (project.root / ".venv/.coli").unlink()
    (project.root / ".venv/half").touch()
    status, out, err = project.run("version")
    assert (status, out) == (0, '["version"] json\n')
    assert "making" in err
    assert not (project.root / ".venv/half").exists()


def test_a_failed_install_is_told_and_the_next_start_repairs_it(project: Project) -> None:
    backend = project.root / "backend.py"
    good = backend.read_text()
    backend.write_text("raise RuntimeError('no such backend')")
    with (project.root / "pyproject.toml").open("a") as file:
        file.write("# changed again\n")
    status, out, err = project.run("version")
    assert (status, out) == (1, "")
    assert "coli: the install failed; the next start tries again" in err
    backend.write_text(good)
    assert project.run("version")[:2] == (0, '["version"] json\n')


def test_an_environment_that_somebody_else_made_is_never_removed(project: Project, tmp_path: Path) -> None:
    for name in ("coli", "pyproject.toml", "backend.py"):
        shutil.copy(project.root / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/mine").touch()
    status, _, err = project.run("version", command=tmp_path / "coli")
    assert status == 1
    assert "was not made by coli" in err
    assert (tmp_path / ".venv/mine").exists()


def test_without_a_python_that_is_new_enough_it_says_what_is_needed(project: Project, tmp_path: Path) -> None:
    shutil.copy(project.root / "coli", tmp_path / "coli")
    shutil.copy(project.root / "pyproject.toml", tmp_path / "pyproject.toml")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "dirname", "readlink", "cksum", "tr"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")  # what a Python that is too old answers
    (tools / "python3").chmod(0o755)
    status, _, err = project.run("version", command=tmp_path / "coli", PATH=str(tools))
    assert status == 1
    assert err.startswith("coli: Python 3.11 or newer is needed")
