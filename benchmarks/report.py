"""What a benchmark leaves in its folder: lines of JSON and a Markdown table."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import Row


class Column(NamedTuple):
    """A column of a table of rows."""

    title: str
    of: Callable[[Row], object]
    """Takes a row, returns what to print in the cell; None prints nothing."""


def append_line(row: Row, path: Path) -> None:
    """Add a line of JSON; it is on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_lines(rows: Sequence[Row], path: Path) -> None:
    """Replace a file by these rows, a line of JSON each."""
    path.unlink(missing_ok=True)
    for row in rows:
        append_line(row, path)


def read_lines(path: Path) -> list[Row]:
    """The rows of a file, none if there is no file; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_ok(row: Row) -> bool:
    """Whether the row's candidate or system was right, and was timed."""
    return bool(row["status"] == "ok")


NOTE = Column("note", lambda row: None if is_ok(row) else f"{row['status']}: {row.get('reason')}")
"""Says why a row was not timed."""


def number(title: str, name: str, form: str, scale: float = 1.0) -> Column:
    """A column with the row's number of this name times `scale`; empty where it has none."""

    def of(row: Row) -> str | None:
        value = row.get(name)
        return None if value is None else form.format(value * scale)

    return Column(title, of)


def spread(unit: str, scale: float = 1.0) -> Column:
    """A column with the 20th and 80th percentile; empty where nothing was timed."""

    def of(row: Row) -> str | None:
        if "p20_s" not in row:
            return None
        return f"{row['p20_s'] * scale:.3f}-{row['p80_s'] * scale:.3f}"

    return Column(f"p20-p80 {unit}", of)


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [[column.title for column in columns], ["---"] * len(columns)]
    lines += [[_cell(column.of(row)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def hardware(machine: Row, num_processes: int) -> str:
    """The machine in a few words, for titles."""
    return f"{num_processes} x {machine['device']}, {machine['dtype']}, torch {machine['torch']}"


def heading(title: str, machine: Row) -> str:
    """A title in Markdown, with versions, date and command."""
    versions = {name: machine[name] for name in ("torch", "cuda", "nccl", "cudnn")}
    versions |= machine["versions"]
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    command = shlex.join(["python", *sys.argv])
    return f"# {title}\n\n{said}; {machine['date']}.\n\n`{command}`\n\n"
