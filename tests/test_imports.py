"""Who may import whom. Every import statement counts, those inside functions too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"coli_server": ROOT / "server/coli_server", "coli_client": ROOT / "client/coli_client"}

# Modules that everybody may import: they import nothing of ours but one another.
LEAVES = {"errors", "ranges", "settings"}

# A package of coli_server and what it may import besides the leaves and itself.
ALLOWED = {
    "cli": {"daemon", "bench", "models", "coli_client"},
    "daemon": {"engine", "routing", "protocol", "telemetry"},
    "bench": {"engine", "experts", "routing", "models", "coli_client"},
    "engine": {"experts", "routing", "telemetry"},
    "models": {"engine", "experts"},
    "experts": set(),
    "routing": set(),
    "protocol": set(),
    "telemetry": set(),
    **{leaf: set() for leaf in LEAVES},
}


def modules() -> Iterator[tuple[str, Path]]:
    """The dotted name and the file of every module of ours."""
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


MODULES = dict(modules())


def imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """The dotted name of everything that `path` imports; `types`: also where only type checkers look."""
    for node in _nodes(ast.parse(path.read_text("utf-8")), types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else str(node.module)


def _nodes(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if types or not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _nodes(child, types)


def area(module: str) -> str:
    """`daemon` for coli_server.daemon.connection, `coli_client` for anything in it, empty for coli_server."""
    package, _, rest = module.partition(".")
    return package if package == "coli_client" else rest.partition(".")[0]


def ours(module: str, *, types: bool = True) -> Iterator[str]:
    return (name for name in imports(MODULES[module], types=types) if name.partition(".")[0] in SOURCES)


def test_the_rules_name_every_package_that_exists() -> None:
    assert {area(module) for module in MODULES} - {"", "coli_client"} <= set(ALLOWED)


@pytest.mark.parametrize("module", [name for name in MODULES if area(name) not in ("", "coli_client")])
def test_a_package_imports_only_what_it_may(module: str) -> None:
    here = area(module)
    allowed = ALLOWED[here] | LEAVES | {here, ""}
    wrong = {name for name in ours(module) if area(name) not in allowed}
    assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


def test_the_package_itself_imports_nothing() -> None:
    assert list(imports(MODULES["coli_server"])) == []


@pytest.mark.parametrize("module", [name for name in MODULES if area(name) == "coli_client"])
def test_the_client_needs_the_standard_library_alone(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports(MODULES[module])}
    assert packages <= sys.stdlib_module_names | {"coli_client"}


@pytest.mark.parametrize("module", [name for name in MODULES if area(name) == "protocol"])
def test_the_protocol_does_no_io_and_knows_no_arrays(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports(MODULES[module])}
    assert not packages & {"asyncio", "numpy", "socket", "selectors", "threading", "uvloop"}


def test_no_module_imports_itself_in_a_circle() -> None:
    edges = {module: {name for name in ours(module, types=False) if name in MODULES} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in edges[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
