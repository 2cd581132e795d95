"""What `longctx data` prints of a run's data before it shows rows."""

import shlex
from pathlib import Path

import numpy as np

from longctx_patch.cli.run_data import SeenData
from longctx_patch.cli.text_table import aligned

BARS = 40
"""Characters of the longest bar."""


def render(data: SeenData, file: Path) -> str:
    """The report, and the next command."""
    lines = [f"{file}: rows of {data.seq_len} tokens at most, of {data.kind}", ""]
    for name, facts in data.facts.items():
        lines += [f"{name}:", *(f"  {line}" for line in aligned(facts)), ""]
    lines += [f"The run will be refused: {why}\n" for why in data.refused]
    what = "document" if data.recipe == "finetune" else "row"
    lines += [f"tokens of a {what} (train):", *_histogram(data.lengths), ""]
    if not data.refused:
        train = shlex.join(["longctx", "train", str(file.parent)])
        lines.append(f"The run finds these rows made. Next: {train}")
    return "\n".join(lines)


def _histogram(lengths: np.ndarray) -> list[str]:
    """Bars over lengths, each twice as long as the one before."""
    edges = [1]
    while edges[-1] <= lengths.max():
        edges.append(2 * edges[-1])
    counts, _ = np.histogram(lengths, bins=edges)
    first = int(np.flatnonzero(counts)[0])
    rows = [
        (f"{low:,} to {high - 1:,}", "#" * -(-BARS * int(count) // int(counts.max())), f"{count:,}")
        for low, high, count in list(zip(edges, edges[1:], counts, strict=False))[first:]
    ]
    middle = ", ".join(f"{p} %: {int(np.percentile(lengths, p)):,}" for p in (50, 90, 99))
    return [
        *(f"  {line}" for line in aligned(rows)),
        f"  so many per cent are no longer than: {middle}; longest {int(lengths.max()):,}",
    ]
