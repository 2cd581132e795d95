"""What attention.py and step.py share: options, and one launch after the other with a report."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from launch import Budget, Ending, run_job
from measure import Row, machine
from report import read_lines

HERE = Path(__file__).parent


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every script that starts launches."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--gpus", type=int, default=4, help="processes of a launch (4); without GPUs on the CPU")
    add("--limit-s", type=float, default=300.0, help="of each launch (default 300)")
    add("--budget-s", type=float, default=math.inf, help="of all launches (default none)")
    return parser


def check_all(
    parser: argparse.ArgumentParser, check: Callable[[str], object], texts: Iterable[str]
) -> None:
    """End with the parser's error where `check` raises ValueError for one of the texts."""
    for text in texts:
        try:
            check(text)
        except ValueError as error:
            parser.error(str(error))


def run_launch(
    script: str,
    name: str,
    settings: Row,
    arguments: argparse.Namespace,
    limit_s: float,
    packages: str | None = None,
) -> tuple[list[Row], Ending]:
    """(rows that the launch `name` of `script` wrote, how it ended); prints how it ended too.

    The script gets a file with `settings`, which also names the file for its rows.
    """
    lines, job = (arguments.out / f"{name}.{ending}" for ending in ("lines", "job.json"))
    lines.unlink(missing_ok=True)
    job.write_text(json.dumps({**settings, "lines": str(lines)}))
    logs = arguments.out / name
    ending = run_job(HERE / script, [str(job)], arguments.gpus, limit_s, logs, packages)
    rows = read_lines(lines)
    job.unlink(missing_ok=True)
    said = ending.problem or "ended well"
    print(f"{name}: {ending.seconds:.0f} s, {len(rows)} rows, {said}", flush=True)
    return rows, ending


def run_all(
    subject: str,
    names: Sequence[str],
    launch: Callable[[str, int, Sequence[Row], float], list[Row]],
    report: Callable[[Sequence[Row], Row], None],
    arguments: argparse.Namespace,
) -> None:
    """Start one launch for each name, and print the report at the end.

    Args:
        subject: the beginning of the names of all files in the folder `--out`.
        launch: makes new rows from a name, its number, the rows so far and a limit in seconds.
        report: writes all rows so far, measured on a machine, to files.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    budget, rows = Budget(arguments.budget_s), list[Row]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for number, name in enumerate(names):
        rows += launch(name, number, rows, budget.limit_s(arguments.limit_s))
        # Written after each launch, so that an interruption loses none of the rows before it.
        report(rows, machine(device))
        for lines in arguments.out.glob(f"{subject}.*.lines"):
            lines.unlink()
    print((arguments.out / f"{subject}.md").read_text(), file=sys.stdout)
