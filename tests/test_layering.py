"""A room imports rooms of lower floors only, few of them, and the imports within a room have no
cycle.

A room is a folder with all that lies in it, or a module where it lies in the package itself. Who
imports a public name of the package imports the room that has it.
"""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from longctx_patch import _HOME

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "longctx_patch"

# From the lowest floor up; rooms of one floor don't import each other.
FLOORS = (
    ("rules", "transport", "memory"),
    ("sequence", "health"),
    ("plans", "kernels", "checkpoints"),
    ("config", "loss"),
    ("engine", "families", "data"),
    ("planner", "plugin", "hf"),
    ("evaluation", "verification"),
    ("trainer",),
    ("recipes",),
    ("cli",),
)
MOST_ARROWS = 110
"""Pairs of rooms of which one imports the other."""


def room_of(path: Path) -> str:
    if path.parent == PACKAGE:
        return path.stem
    folder = path.relative_to(ROOT).as_posix().removeprefix("longctx_patch/")
    return folder.split("/")[0]


def modules() -> dict[str, Path]:
    """Every module of the installed package, by its dotted name."""
    found = {}
    for top in ("longctx_patch", "cli", "recipes"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if top == "longctx_patch" else ("longctx_patch", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(path: Path) -> set[str]:
    """Dotted names of our modules that a file imports, for types alone or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                home = f"longctx_patch.{_HOME.get(alias.name)}"
                inner = home if node.module == "longctx_patch" else f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return (found & MODULES.keys()) - {"longctx_patch"}


# The package itself and the rooms' `__init__` export names, and are no part of a room.
IMPORTS = {name: imports_of(path) for name, path in MODULES.items() if path.name != "__init__.py"}


def test_every_folder_has_a_floor_and_no_two_files_one_name() -> None:
    rooms = {room_of(MODULES[name]) for name in IMPORTS}
    assert rooms == {room for floor in FLOORS for room in floor}
    names = Counter(path.name for path in MODULES.values())
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_rooms_import_lower_floors_only(name: str) -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    room = room_of(MODULES[name])
    for other in IMPORTS[name]:
        theirs = room_of(MODULES[other])
        allowed = theirs == room or floor_of[theirs] < floor_of[room]
        assert allowed, f"{name} imports {other}, which is not below"


def test_a_room_imports_few_others() -> None:
    arrows = {
        (room_of(MODULES[name]), room_of(MODULES[other]))
        for name, others in IMPORTS.items()
        for other in others
    }
    assert sum(room != other for room, other in arrows) <= MOST_ARROWS


def test_no_circle_inside_a_room() -> None:
    graph = {name: others & IMPORTS.keys() - {name} for name, others in IMPORTS.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
