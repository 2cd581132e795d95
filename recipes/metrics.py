"""One line of JSON per step, the numbers of this process that belong in it, and a progress bar."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends steps to `metrics.jsonl`; does nothing in processes that should not write."""

    def __init__(self, folder: Path, *, writes: bool, first_step: int) -> None:
        """Lines of later steps than `first_step` are removed: these steps will be run again."""
        self._path = folder / METRICS_FILE if writes else None
        if self._path is not None and self._path.exists():
            lines, said = whole_lines(self._path)
            kept = [line for line in lines if line.get("step", 0) <= first_step]
            self._path.write_text("".join(map(strict_line, kept)), encoding="utf-8")
            if said:
                print(said, flush=True)

    def write(self, **values: Any) -> None:
        """Add one line; it is on disk when this returns."""
        if self._path is not None:
            if not (folder := self._path.parent).is_dir():  # what the run knows is worth more
                folder.mkdir(parents=True)
                print(
                    f"output {folder} was deleted while the run goes on. It is made again, with "
                    "what is written from now on.",
                    flush=True,
                )
            with self._path.open("a", encoding="utf-8") as file:
                file.write(strict_line(values))


def strict_line(values: Mapping[str, Any]) -> str:
    """A line of JSON, which has no word for what is not finite: such a number is null, and
    `non_finite` has its name and what it was."""
    odd = {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    said = {**values, **dict.fromkeys(odd), **({"non_finite": odd} if odd else {})}
    return json.dumps(said, allow_nan=False) + "\n"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl` that are whole, each with a number of its step."""
    return whole_lines(folder / METRICS_FILE)[0]


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines of a file of metrics that are whole, and what to say of others: a kill cuts the
    last one off. A loss of power may leave NUL bytes around one, which are dropped."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    lines, bad = [], []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if line.endswith("\n") and isinstance(value, dict):
            lines.append(value)
        else:
            bad.append(str(number))
    return lines, f"{path.name}: line {', '.join(bad)} is incomplete and left out." if bad else ""


def peak_memory_bytes(device: "torch.device") -> int:
    """The most memory held so far: on the CPU what is resident in the process, on a GPU what torch
    allocated since `checkpoint=auto` last changed what is recomputed."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


SECONDS_BETWEEN_LINES = 30


class ProgressBar(tqdm):
    """tqdm's bar on a terminal; elsewhere a line every half a minute, and one at the end."""

    def __init__(self, **options: Any) -> None:
        if not sys.stderr.isatty():
            often = SECONDS_BETWEEN_LINES
            options |= {"mininterval": often, "maxinterval": often}
        super().__init__(**options)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            printer: Callable[[str], None] = tqdm.status_printer(file)
            return printer
        return lambda line: print(line, file=file, flush=True)
