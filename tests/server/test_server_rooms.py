"""The parts of the server: which may import which, and no circle between its files."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "outrider" / "server"
FILES = {
    ".".join(("outrider", "server", *path.relative_to(SERVER).with_suffix("").parts)): path
    for path in sorted(SERVER.rglob("*.py"))
    if path.name != "__init__.py"
}

# Which part may import which. Arrows point one way.
KNOWS: dict[str, set[str]] = {
    "settings": set(),
    "queue": set(),
    "ops": {"queue"},
    "http": {"ops", "queue"},
    "web": {"http"},
    "openai": {"http", "ops", "queue"},
    "service": {"http", "openai", "ops", "queue", "settings"},
    "routes": {"http", "openai", "service"},
    "app": {"http", "openai", "ops", "queue", "routes", "service", "settings", "web"},
    "run": {"app", "http", "ops", "queue", "settings"},
}


@cache
def imported(module: str) -> frozenset[str]:
    """The server's own modules that a module imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found & FILES.keys())


def part_of(module: str) -> str:
    return module.split(".")[2]


def test_every_part_is_listed():
    assert {part_of(module) for module in FILES} == KNOWS.keys()


@pytest.mark.parametrize("module", FILES)
def test_arrows_between_parts_point_one_way(module: str):
    part = part_of(module)
    for other in map(part_of, imported(module)):
        assert other == part or other in KNOWS[part], f"{part} must not know {other}"


def test_the_parts_form_no_circle():
    list(TopologicalSorter(KNOWS).static_order())


def test_the_files_form_no_circle():
    list(TopologicalSorter({module: imported(module) for module in FILES}).static_order())
