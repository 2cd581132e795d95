"""What a benchmark leaves in its folder: lines of JSON, a Markdown table, a plot."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import Row


class Column(NamedTuple):
    """A column of a table of rows."""

    title: str
    of: Callable[[Row], object]
    """Takes a row, returns what to print in the cell; None prints nothing."""


class Bars(NamedTuple):
    """One panel of a plot."""

    title: str
    unit: str
    lengths: Mapping[str, float]
    """The length of each bar by its name, from top to bottom."""


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
    size, ratios = (9, 0.4 + sum(heights)), {"height_ratios": heights}
    figure, axes = plt.subplots(
        len(drawn), figsize=size, gridspec_kw=ratios, squeeze=False, layout="constrained"
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
