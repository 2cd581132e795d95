"""What a benchmark leaves in its folder: lines of JSON, a Markdown table, a plot."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import Row


class Column(NamedTuple):
    """Of a table of rows."""

    title: str
    of: Callable[[Row], object]
    """What to print of a row; None prints nothing."""


class Bars(NamedTuple):
    """One panel of a plot."""

    title: str
    unit: str
    lengths: Mapping[str, float]
    """By name, from top to bottom."""


def append_line(row: Row, path: Path) -> None:
    """Add a line of JSON; it is on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[Row]:
    """The rows of a file, none if there is no file; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [[column.title for column in columns], ["---"] * len(columns)]
    lines += [[_cell(column.of(row)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def hardware(machine: Row, num_processes: int) -> str:
    """In a few words, for titles."""
    return f"{num_processes} x {machine['device']}, {machine['dtype']}, torch {machine['torch']}"


def heading(title: str, machine: Row) -> str:
    """What was run where, in Markdown."""
    versions = {name: machine[name] for name in ("torch", "cuda", "nccl", "cudnn")}
    versions |= machine["versions"]
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    command = shlex.join(["python", *sys.argv])
    return f"# {title}\n\n{said}; {machine['date']}.\n\n`{command}`\n\n"


def plot(panels: Sequence[Bars], path: Path, title: str) -> bool:
    """Horizontal bars; False, and no file, where matplotlib isn't installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [panel for panel in panels if panel.lengths]
    if not drawn:
        return False
    heights = [1.0 + 0.22 * len(panel.lengths) for panel in drawn]
    figure, axes = plt.subplots(
        len(drawn),
        1,
        figsize=(9, 0.4 + sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, panel in zip(axes[:, 0], drawn, strict=True):
        names, lengths = list(panel.lengths), list(panel.lengths.values())
        bars = axis.barh(range(len(names)), lengths, color="tab:blue")
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.set_title(panel.title, fontsize=9)
        axis.set_xlabel(panel.unit, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
