"""A room imports rooms of lower floors only, and the imports within a room have no cycle.

A room is a folder: its own modules, without those of folders below it.
"""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "longctx_patch"

# From the lowest floor up; rooms of one floor don't import each other. A file of the package itself
# is a room of its own; `__init__` exports public names of all rooms below it.
FLOORS = (
    ("rules",),
    ("sequence", "transport", "memory", "evaluation/tasks"),
    ("plans", "kernels", "health"),
    ("plans/generators", "plans/verify", "kernels/backends", "loss"),
    ("config",),
    ("engine/chain",),
    ("engine", "kernels/select", "data", "families"),
    ("planner",),
    ("operator",),
    ("plugin", "hf/model"),
    ("hf/layers",),
    ("hf/call",),
    ("hf/loss",),
    ("hf",),
    ("checkpoints", "evaluation"),
    ("trainer",),
    ("__init__",),
    ("verification", "diagnosis"),
    ("recipes/data",),
    ("recipes",),
    ("cli",),
)


def room_of(path: Path) -> str:
    """The folder of a module, or the module where it lies in the package itself."""
    if path.parent == PACKAGE:
        return path.stem
    folder = path.parent.relative_to(ROOT).as_posix()
    return folder.removeprefix("longctx_patch/")


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
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found & MODULES.keys()


def test_every_folder_has_a_floor() -> None:
    rooms = {room_of(path) for path in MODULES.values()}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_rooms_import_lower_floors_only(name: str) -> None:
    path = MODULES[name]
    if path.name == "__init__.py":
        return  # exports names of the room and is no part of it
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    room = room_of(path)
    for other in imports_of(path):
        theirs = room_of(MODULES[other])
        allowed = theirs == room or floor_of[theirs] < floor_of[room]
        assert allowed, f"{name} imports {other}, which is not below"


def test_no_circle_inside_a_room() -> None:
    graph = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            others = imports_of(path) - {name}
            graph[name] = {o for o in others if MODULES[o].name != "__init__.py"}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
