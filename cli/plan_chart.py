"""A bar for each candidate of `longctx plan`: memory of a GPU by component."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longctx_patch.cli.plan_report import COMPONENTS, MEANINGS, name_of
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.search import Result, usable_bytes

BARS = 12
SMALL = 0.2
"""The line of the memory that may be taken is drawn if the longest bar is over this share of it."""


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the first candidates, as they are listed."""
    from matplotlib.figure import Figure

    shown = list(results[:BARS])[::-1]
    figure = Figure(figsize=(12, 2.2 + 0.4 * len(shown)), layout="constrained")
    draw_bars(figure.subplots(), shown)
    job = shown[0].job
    figure.suptitle(f"{job.shape.name} on {job.cluster}, {job.seq_len:,} tokens")
    words = [f"{name}: {MEANINGS[name]}." for name in ("sp", "checkpoint", "tiles")]
    figure.supxlabel("\n".join(words), fontsize="x-small", x=0.01, ha="left", wrap=True)
    figure.savefig(path, dpi=150)


def draw_bars(axes: Any, shown: Sequence[Result]) -> None:
    """Draw a bar for each candidate on matplotlib's axes, the last one on top."""
    usable, most = usable_bytes(shown[0].job), max(result.memory.total for result in shown)
    unit, unit_bytes = ("GiB", GIB) if most >= GIB else ("MiB", 2**20)
    left = [0.0] * len(shown)
    for part in shown[0].memory.parts():
        widths = [result.memory.parts()[part] / unit_bytes for result in shown]
        label = f"{part}: {COMPONENTS[part]}" if part in COMPONENTS else part
        axes.barh([name_of(result) for result in shown], widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel(f"{unit} of one GPU, of which {usable / GIB:.0f} GiB may be taken")
    if most > SMALL * usable:
        axes.axvline(usable / unit_bytes, color="black", linestyle="--", label="may be taken")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
