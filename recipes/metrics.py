"""One line of JSON per step, and the numbers of this process that belong in it."""

import json
import sys
from pathlib import Path

import torch

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends steps to `metrics.jsonl`; does nothing in processes that should not write."""

    def __init__(self, folder: Path, *, writes: bool, first_step: int) -> None:
        """Lines of later steps than `first_step` are removed: these steps will be run again."""
        self._path = folder / METRICS_FILE if writes else None
        if self._path is not None and self._path.exists():
            kept = [line for line in read_metrics(folder) if line["step"] <= first_step]
            self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values: float | int) -> None:
        """Add one line; it is on disk when this returns."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`; a last line cut off by a kill is left out."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: on the CPU what is resident in the process, on a GPU what torch
    allocated since `checkpoint=auto` last changed what is recomputed."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
