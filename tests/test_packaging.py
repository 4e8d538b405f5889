"""What an installation holds and needs, read from pyproject.toml and from the sources themselves."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import coli_server
from coli_server.cli import main

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = {"coli_server": ROOT / "server/coli_server", "coli_client": ROOT / "client/coli_client"}

# Packages that come with a declared one by its own promise.
BROUGHT_ALONG = {"llvmlite": "numba"}


def names(extra: str) -> set[str]:
    """The import names of what an extra asks for: here they are those of the distributions."""
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0].replace("-", "_") for requirement in EXTRAS[extra]}


def imported(folder: Path) -> set[str]:
    """Top-level packages that the modules of `folder` import anywhere."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - sys.stdlib_module_names - set(SOURCES)


def test_the_base_install_needs_nothing() -> None:
    assert PROJECT["dependencies"] == []


def test_the_version_is_the_packages_own() -> None:
    assert PROJECT["version"] == coli_server.__version__


def test_every_package_that_the_server_imports_is_in_its_extra() -> None:
    carve = SOURCES["coli_server"] / "models/carve"
    needed = {BROUGHT_ALONG.get(name, name) for name in imported(SOURCES["coli_server"])}
    needed -= names("carve") & imported(carve)
    needed -= names("lm-eval") & imported(SOURCES["coli_server"] / "bench")
    assert needed <= names("server") | {"pytest"}  # `coli test` starts pytest, of the extra dev


def test_the_console_script_is_the_command_line() -> None:
    assert EntryPoint("coli", PROJECT["scripts"]["coli"], "console_scripts").load() is main


@pytest.mark.parametrize("package", SOURCES)
def test_every_file_of_a_package_is_installed(package: str) -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"][package]
    for path in SOURCES[package].rglob("*"):
        name = path.relative_to(SOURCES[package]).as_posix()
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
            assert any(fnmatch(name, pattern) for pattern in patterns), (
                f"{package}/{name} would not be installed"
            )
    assert "py.typed" in patterns


@pytest.mark.parametrize("package", SOURCES)
def test_every_folder_with_modules_is_a_package(package: str) -> None:
    for path in SOURCES[package].rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"{path.parent} would not be installed"
