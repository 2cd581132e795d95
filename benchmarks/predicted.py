"""How near `longctx plan` comes: training runs on this machine's GPUs beside what was predicted.

    python benchmarks/predicted.py --gpus 2 --hardware h200 --out results/ \\
        --runs llama-8b:layers=8,tokens=65536,checkpoint=attention qwen2-7b:tokens=32768,lora=true

A run is `model:option=value,...`: a name of benchmarks/model_shapes.py with random weights,
`tokens` of a row, and if you like `layers`, `lora`, `rank`, `dtype` (of the weights as loaded),
`fused` (Liger Kernel's layers), `rehearse`, `steps` and `warm_ups`; the others are fields of
LongContextConfig. Each run first makes a step on a small row, whose loss has to be that of the
model before it was patched. Memory is the most that torch's allocator had given out on a GPU,
seconds the median of the steps, and beside both is what `preflight` expected before the first step.
Writes predicted.jsonl and predicted.md into --out.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from config_text import options_of
from launch import Budget, end_with_children, run_job
from measure import Row, machine
from model_shapes import MODELS
from report import Column, append_line, hardware, heading, read_lines, table
from runs import Run

HERE = Path(__file__).parent


def ratio_of(found: float | None, measured: float | None) -> str | None:
    return f"{found / measured - 1:+.1%}" if found and measured else None


def _pair(title: str, predicted: str, measured: str, form: str) -> tuple[Column, ...]:
    def of(name: str) -> Column:
        words = f"{title} {name.split('_')[0]}"
        return Column(words, lambda r: form.format(r[name]) if r.get(name) is not None else None)

    return (
        of(predicted),
        of(measured),
        Column("", lambda row: ratio_of(row.get(predicted), row.get(measured))),
    )


COLUMNS = (
    Column("run", lambda row: row["run"]),
    *_pair("GiB", "predicted_gib", "measured_gib", "{:.1f}"),
    Column(
        "preflight GiB", lambda r: f"{r['preflight_gib']:.1f}" if r.get("preflight_gib") else None
    ),
    *_pair("s", "predicted_s", "measured_s", "{:.3f}"),
    *_pair("host GiB", "predicted_host_gib", "measured_host_gib", "{:.1f}"),
    Column("MFU", lambda row: f"{row['mfu']:.1%}" if "mfu" in row else None),
    Column("note", lambda row: row.get("problem")),
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--gpus", type=int, required=True, help="processes; without GPUs on the CPU")
    add("--hardware", default="h200", help="kind of GPU to predict for (h200)")
    add("--runs", nargs="+", required=True, help="model:option=value,...")
    add("--states-on-host", action="store_true", help="weights and optimizer in host memory")
    add("--limit-s", type=float, default=300.0, help="of each launch (default 300)")
    add("--budget-s", type=float, default=math.inf, help="of all launches (default none)")
    parsed = parser.parse_args(arguments)
    if parsed.states_on_host and not torch.cuda.is_available():
        parser.error("--states-on-host: FSDP2 moves states from a GPU, and there is none.")
    for run in parsed.runs:
        name, _, options = run.partition(":")
        if name not in MODELS:
            parser.error(f"--runs {run}: name one of {', '.join(MODELS)}.")
        try:
            if "tokens" not in options_of(options):
                parser.error(f"--runs {run}: say tokens=, the length of a row.")
            Run.parse(run)
        except ValueError as error:
            parser.error(str(error))
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    budget, rows, waiting = Budget(arguments.budget_s), list[Row](), list(arguments.runs)
    where = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    number = 0
    while waiting:  # one launch for all, and another one after a run that ended its launch
        lines, job = out / f"{number}.lines", out / f"{number}.job.json"
        lines.unlink(missing_ok=True)
        settings = {name: getattr(arguments, name) for name in ("hardware", "states_on_host")}
        job.write_text(json.dumps({"runs": waiting, "lines": str(lines), **settings}))
        limit_s = budget.limit_s(arguments.limit_s)
        logs = out / f"predicted.{number:02}"
        ending = run_job(HERE / "predicted_job.py", [str(job)], arguments.gpus, limit_s, logs)
        found = read_lines(lines)
        if len(found) < len(waiting):
            found.append({"run": waiting[len(found)], "problem": ending.problem})
        rows, waiting, number = rows + found, waiting[len(found) :], number + 1
        lines.unlink(missing_ok=True)
        job.unlink()
        write_report(rows, arguments, where)
    print((out / "predicted.md").read_text(), file=sys.stdout)


def write_report(rows: Sequence[Row], arguments: argparse.Namespace, where: Row) -> None:
    (arguments.out / "predicted.jsonl").unlink(missing_ok=True)
    for row in rows:
        line = {**row, "num_ranks": arguments.gpus, "machine": where}
        append_line(line, arguments.out / "predicted.jsonl")
    title = f"Predicted and measured: {hardware(where, arguments.gpus)}"
    (arguments.out / "predicted.md").write_text(heading(title, where) + table(COLUMNS, rows))


if __name__ == "__main__":
    end_with_children()
    main()
