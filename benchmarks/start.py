"""What a start takes until its first step, by stages, several times in a row.

    python benchmarks/start.py --folder /tmp/start --gpus 1 --layers 8 --tokens 65536

Writes a checkpoint of random weights into FOLDER and has `longctx patch` write a run folder over it
(an adapter, plain text); then runs `longctx train run/ --max-steps 3` as often as asked, each time
from the beginning. The first start is one of a new machine only where nothing has run on it before:
no cache is cleared. Stages are those that a run writes to `start.json`. `beside weights` is the
time until the first step begins, without that of the stage in which weights are read. `--cold`
drops the system's page cache before each start but the first two (root alone can). The losses of
all starts have to agree. Options after `--` are those of `longctx patch`.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoint_files import write_files, write_random
from model_shapes import MODELS, model_config

from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.stages import START_FILE

STEPS = 3
READS_WEIGHTS, FIRST_STEP = "weights", "first step"
"""Stages of the recipe for text."""
ROUNDING = 1e-3
"""Between losses of the same run: kernels on a GPU may add in another order."""
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


def prepare(asked: argparse.Namespace) -> Path:
    """The run folder over a new checkpoint and a text."""
    folder, rows = asked.folder, STEPS * asked.gpus
    model, text, run = folder / "model", folder / "text.txt", folder / "run"
    write_files(model, model_config(asked.model, asked.layers, asked.tokens), write_random)
    lines = (
        f"{number} times {number + 3} is {number * (number + 3)}.\n" for number in range(10**9)
    )
    with text.open("w") as file:
        while file.tell() < 2 * rows * asked.tokens:
            file.write(next(lines))
    words = ["--tokenizer", asked.tokenizer, "--data", str(text), *asked.options]
    words += ["--cpu"] if asked.cpu else []
    sizes = ["--seq-len", str(asked.tokens), "--gpus", str(asked.gpus)]
    longctx("patch", str(model), *sizes, "--out", str(run), *words)
    return run


def start(run: Path, *, cold: bool) -> dict[str, Any]:
    """One start and its steps: seconds by stages, and the loss of the last step."""
    output = run / "training"
    shutil.rmtree(output, ignore_errors=True)
    if cold:
        subprocess.run(["sync"], check=True)
        PAGE_CACHE.write_text("3")
    longctx("train", str(run), "--max-steps", str(STEPS))
    seconds = json.loads((output / START_FILE).read_text())["seconds"]
    before = sum(taken for stage, taken in seconds.items() if stage != FIRST_STEP)
    return {
        "cold": cold,
        "seconds": seconds,
        "beside weights": round(before - seconds[READS_WEIGHTS], 2),
        "loss": read_metrics(output)[-1]["loss"],
    }


def longctx(*words: str) -> None:
    """Run a command of this package, whose words go to this script's errors."""
    command = [sys.executable, "-m", "longctx_patch.cli.main", *words]
    subprocess.run(command, check=True, stdout=2)


def table(starts: list[dict[str, Any]]) -> str:
    """A line for each stage, a column for each start."""
    names = [f"{n}{', cold' if each['cold'] else ''}" for n, each in enumerate(starts, 1)]
    lines = [["stage", *names], ["---"] * (len(starts) + 1)]
    stages = dict.fromkeys(stage for each in starts for stage in each["seconds"])
    for stage in stages:
        lines.append([stage, *(f"{each['seconds'].get(stage, 0):.1f}" for each in starts)])
    lines.append(["beside weights", *(f"{each['beside weights']:.1f}" for each in starts)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(words: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="is made")
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU in place of GPUs")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("options", nargs="*", help="of longctx patch, after --")
    asked = parser.parse_args(words)
    asked.folder.mkdir(parents=True)
    run, starts = prepare(asked), list[dict[str, Any]]()
    for number in range(asked.starts):
        starts.append(start(run, cold=asked.cold and number >= 2))
        print(json.dumps(starts[-1]), flush=True)
        if not math.isclose(starts[-1]["loss"], starts[0]["loss"], rel_tol=ROUNDING):
            raise SystemExit(f"the losses of starts 1 and {number + 1} differ: {starts}")
    print(table(starts))
    return starts


if __name__ == "__main__":
    main()
