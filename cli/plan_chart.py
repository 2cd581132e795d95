"""A bar for each candidate of `longctx plan`: GiB of a GPU by component."""

from collections.abc import Sequence
from pathlib import Path

from longctx_patch.choose.search import Result, usable_bytes
from longctx_patch.cli.plan_report import name_of
from longctx_patch.predict.machines import GIB

BARS = 12


def draw(results: Sequence[Result], path: Path) -> None:
    """Of the first candidates, as they are listed. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--png draws with matplotlib, which is not installed: pip install matplotlib."
        ) from error
    shown = list(results[:BARS])[::-1]
    figure = Figure(figsize=(12, 1.2 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(shown)
    for part in shown[0].memory.parts():
        widths = [result.memory.parts()[part] / GIB for result in shown]
        axes.barh([name_of(result) for result in shown], widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    job = shown[0].job
    axes.axvline(usable_bytes(job) / GIB, color="black", linestyle="--", label="may be taken")
    axes.set_xlabel("GiB of one GPU")
    figure.suptitle(f"{job.shape.name} on {job.cluster}, {job.seq_len:,} tokens")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
