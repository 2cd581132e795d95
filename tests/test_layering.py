"""A module imports only what README's reading order puts before it, or beside it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "longctx_patch"
ROWS = (
    (
        "config",
        "documents",
        "layout",
        "regions",
        "masks",
        "whole_documents",
        "balance",
        "placement",
    ),
    ("plans",),
    ("transport", "kernels"),
    ("groups", "accumulate", "fused_merge", "operands", "partials", "executor"),
    (
        "head_split",
        "head_packing",
        "ulysses",
        "costs",
        "comparison",
        "choice",
        "degrees",
        "call",
        "replay",
        "selective",
        "usp",
        "operator",
    ),
    ("memory", "loss", "fused_softmax", "linear_loss"),
    ("data", "hf", "plugin"),
    ("planner",),
    ("processes", "verification"),
)


def imported_modules(path: Path) -> set[str]:
    """First names below longctx_patch that a file imports, for types alone or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            first, _, rest = name.partition(".")
            if first == "longctx_patch" and rest:
                found.add(rest.split(".")[0])
    return found


def test_rows_import_upwards_only() -> None:
    row_of = {name: number for number, row in enumerate(ROWS) for name in row}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        below = {other for other in imported_modules(path) if row_of[other] > row_of[name]}
        assert not below, f"{path.relative_to(PACKAGE)} imports {sorted(below)}"


def test_the_readme_lists_every_module() -> None:
    readme = (PACKAGE.parent / "README.md").read_text().split("## Reading the code")[1]
    for name in (name for row in ROWS for name in row):
        assert f"`{name}.py`" in readme or f"`{name}/`" in readme, name
