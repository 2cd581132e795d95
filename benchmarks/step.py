"""A training step over long rows on the GPUs of one machine: ours, others, and the floor.

    python benchmarks/step.py --out results/                               # everything, 4 GPUs
    python benchmarks/step.py --out results/ --tokens 131072 --systems ours:ulysses=4 alst --profile
    python benchmarks/step.py --out results/ --gpus 1 --tokens 32768

A Llama-3.1-8B with fewer layers and random weights, full fine-tuning with AdamW, one row of random
tokens. A system is `name:option=value,...`, with the options that benchmarks/systems/NAME.py lists,
and a launch of its own with its own time limit. It first makes a step on a small row, which has to
give the loss and the gradients of one process, and its first loss at each length has to be that of
the first of ours; otherwise it is wrong and not timed. Writes step.jsonl, step.md and step.png into
--out; benchmarks/README.md says more.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from config_text import options_of
from launch import Budget, end_with_children, run_job
from measure import Row, machine
from report import Bars, Column, append_line, hardware, heading, plot, read_lines, table
from step_profile import PARTS
from systems import Shape

HERE = Path(__file__).parent
FLOOR, OUT_OF_MEMORY = "floor", "out of memory"
ONE_GPU_TOKENS, TOKENS = (32768,), (32768, 131072, 262144)
ONE_GPU = (
    "ours:checkpoint=auto",
    "ours:checkpoint=attention",
    "ours:checkpoint=auto,layers=liger",
    "ours:checkpoint=auto,layers=compile",
    "stock",
    "stock:checkpoint=none,liger=true",
)
NAMES = ("ours", "stock", "accelerate_cp", "alst")
PEERS = (
    "accelerate_cp:rotation=allgather",
    "accelerate_cp:rotation=alltoall",
    "accelerate_cp:rotation=allgather,loss=trl,checkpoint=none,liger=true",
    "accelerate_cp:rotation=alltoall,loss=trl,checkpoint=none,liger=true",
    "accelerate_cp:rotation=allgather,loss=trl,checkpoint=offload",
    "alst",
    "alst:loss=liger,checkpoint=none",
)


def default_systems(num_gpus: int) -> tuple[str, ...]:
    """Ours first: its losses are what the others' are compared with."""
    if num_gpus == 1:
        return ONE_GPU
    ours = [f"ours:ulysses={num_gpus},checkpoint={policy}" for policy in ("auto", "attention")]
    ours += [f"{ours[0]},layers={layers}" for layers in ("liger", "compile")]
    ours += [f"ours:ring={num_gpus},checkpoint=auto"]
    return (*ours, *PEERS)


def run_launch(
    number: int,
    system: str,
    expected: dict[int, float],
    arguments: argparse.Namespace,
    limit_s: float,
) -> list[Row]:
    """What one launch gave, and a row for how it went wrong."""
    name, (system, packages) = _file_name(number, system), without_packages(system)
    lines, job = arguments.out / f"{name}.lines", arguments.out / f"{name}.job.json"
    lines.unlink(missing_ok=True)
    settings = {
        "system": system,
        "tokens": sorted(arguments.tokens),
        "shape": asdict(arguments.shape),
        "expected_losses": expected,
        "lines": str(lines),
        **{
            option: getattr(arguments, option)
            for option in ("steps", "check_tokens", "floor_kernels")
        },
        "profile": arguments.profile and system.startswith("ours"),
    }
    job.write_text(json.dumps(settings))
    script = HERE / ("step_floor_job.py" if system == FLOOR else "step_job.py")
    ending = run_job(script, [str(job)], arguments.gpus, limit_s, arguments.out / name, packages)
    rows = read_lines(lines)
    job.unlink(missing_ok=True)
    if ending.problem is not None and not any(row["status"] == OUT_OF_MEMORY for row in rows):
        status = OUT_OF_MEMORY if "OutOfMemoryError" in ending.problem else "failed"
        rows.append({"system": system, "status": status, "reason": ending.problem})
    print(f"{system}: {ending.seconds:.0f} s, {ending.problem or 'ended well'}", flush=True)
    return rows


def without_packages(system: str) -> tuple[str, str | None]:
    """(the system without its option `packages`, the value of that)."""
    name, colon, options = system.partition(":")
    kept = [option for option in options.split(",") if not option.startswith("packages=")]
    folder = options_of(options).get("packages")
    return f"{name}{colon if any(kept) else ''}{','.join(kept)}", folder


def _file_name(number: int, system: str) -> str:
    return f"step.{number:02}.{system.partition(':')[0]}"


def first_losses(rows: Sequence[Row]) -> dict[int, float]:
    """By length, of the first of ours that was timed."""
    found: dict[int, float] = {}
    for row in rows:
        if row["system"].startswith("ours") and row["status"] == "ok":
            found.setdefault(row["num_tokens"], row["losses"][0])
    return found


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with their share of the floor and their speed against the best of the others'."""
    floors = {r["num_tokens"]: r["seconds"] for r in rows if r["system"] == FLOOR and _ok(r)}
    best: dict[int, float] = {}
    for row in rows:
        if _ok(row) and row["system"] != FLOOR and not row["system"].startswith("ours"):
            tokens = row["num_tokens"]
            best[tokens] = min(best.get(tokens, row["seconds"]), row["seconds"])
    ratios = []
    for row in rows:
        extra = {}
        for name, of in (("share_of_floor", floors), ("speedup_over_best_peer", best)):
            if _ok(row) and row["system"] != FLOOR and row["num_tokens"] in of:
                extra[name] = of[row["num_tokens"]] / row["seconds"]
        ratios.append({**row, **extra})
    return ratios


def _ok(row: Row) -> bool:
    return bool(row["status"] == "ok")


def _number(title: str, name: str, form: str) -> Column:
    return Column(title, lambda row: form.format(row[name]) if row.get(name) is not None else None)


COLUMNS = (
    Column("system", lambda row: row["system"]),
    _number("s/step", "seconds", "{:.3f}"),
    Column("p20-p80 s", lambda r: f"{r['p20_s']:.3f}-{r['p80_s']:.3f}" if "p20_s" in r else None),
    _number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    _number("model TFLOP/s/GPU", "model_tflops_per_s_per_gpu", "{:.0f}"),
    _number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    _number("reserved GiB", "peak_reserved_gib", "{:.1f}"),
    _number("x best peer", "speedup_over_best_peer", "{:.2f}"),
    _number("of floor", "share_of_floor", "{:.1%}"),
    Column("first loss", lambda row: f"{row['losses'][0]:.4f}" if row.get("losses") else None),
    Column("note", lambda row: None if _ok(row) else f"{row['status']}: {row.get('reason')}"),
)


def profile_table(row: Row) -> str:
    """Milliseconds of one step by part, in Markdown."""
    parts, ranks = row["profile"]["milliseconds"], row["profile"]["by_rank"]
    total = sum(parts.values())
    rows: list[Row] = [
        {"part": part, "ms": parts[part], "ranks": [rank[part] for rank in ranks]} for part in PARTS
    ]
    rows.append({"part": "all", "ms": total, "ranks": [sum(rank.values()) for rank in ranks]})
    columns = (
        Column("part", lambda r: r["part"]),
        Column("ms", lambda r: f"{r['ms']:.1f}"),
        Column("share", lambda r: f"{r['ms'] / total:.1%}"),
        Column("ranks", lambda r: f"{min(r['ranks']):.1f} to {max(r['ranks']):.1f}"),
    )
    title = f"### {row['system']}, {row['num_tokens']:,} tokens: one step by part\n\n"
    return f"{title}{table(columns, rows)}\n"


def write_report(rows: Sequence[Row], arguments: argparse.Namespace, where: Row) -> None:
    out = arguments.out
    (out / "step.jsonl").unlink(missing_ok=True)
    for row in rows:
        append_line({**row, "num_ranks": arguments.gpus, "machine": where}, out / "step.jsonl")
    title = f"A training step: {hardware(where, arguments.gpus)}"
    text = heading(title, where)
    shape = asdict(arguments.shape)
    text += f"Llama, {', '.join(f'{name} {value}' for name, value in shape.items())}.\n\n"
    panels = []
    for num_tokens in sorted(arguments.tokens):
        mine = [row for row in rows if row.get("num_tokens") == num_tokens]
        mine.sort(key=lambda row: (not _ok(row), row.get("seconds") or 0.0))
        text += f"## {num_tokens:,} tokens\n\n{table(COLUMNS, mine)}\n"
        text += "".join(profile_table(row) for row in mine if row.get("profile"))
        speeds = {
            row["system"]: row["tokens_per_s_per_gpu"]
            for row in mine
            if "tokens_per_s_per_gpu" in row
        }
        panels.append(Bars(f"{num_tokens:,} tokens", "tokens/s/GPU", speeds))
    rest = [row for row in rows if "num_tokens" not in row]
    if rest:
        text += f"## Not run to the end\n\n{table((COLUMNS[0], COLUMNS[-1]), rest)}\n"
    (out / "step.md").write_text(text)
    plot(panels, out / "step.png", title)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--gpus", type=int, default=4, help="processes of a launch (4); without GPUs on the CPU")
    add("--tokens", type=int, nargs="+", help="of the row (default 32768 131072 262144)")
    add("--systems", nargs="+", help="name:option=value,...; ours first (default: all)")
    add("--steps", type=int, default=5, help="timed steps (default 5)")
    add("--check-tokens", type=int, default=4096, help="of the row compared (default 4096)")
    add("--limit-s", type=float, default=300.0, help="of each launch (default 300)")
    add("--budget-s", type=float, default=math.inf, help="of all launches (default none)")
    add("--profile", action="store_true", help="of ours: one step by part")
    add("--no-floor", action="store_true", help="leave the floor out")
    add("--floor-kernels", nargs="+", help="default: all fast ones")
    for name, value in asdict(Shape()).items():
        add(f"--{name.replace('_', '-')}", type=int, default=value)
    parsed = parser.parse_args(arguments)
    parsed.shape = Shape(**{name: getattr(parsed, name) for name in asdict(Shape())})
    parsed.tokens = parsed.tokens or (ONE_GPU_TOKENS if parsed.gpus == 1 else TOKENS)
    parsed.systems = parsed.systems or default_systems(parsed.gpus)
    for system in parsed.systems:
        name, _, options = system.partition(":")
        if "." not in name and name not in (*NAMES, FLOOR):
            parser.error(f"--systems {system}: name one of {', '.join(NAMES)}.")
        try:
            options_of(options)
        except ValueError as error:
            parser.error(str(error))
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = Budget(arguments.budget_s)
    rows: list[Row] = []
    systems = [*([] if arguments.no_floor else [FLOOR]), *arguments.systems]
    for number, system in enumerate(systems):
        limit_s = budget.limit_s(arguments.limit_s)
        rows += run_launch(number, system, first_losses(rows), arguments, limit_s)
        # After each, so that an interruption leaves the systems that were done before it.
        write_report(with_ratios(rows), arguments, machine(device))
        (arguments.out / f"{_file_name(number, system)}.lines").unlink(missing_ok=True)
    print((arguments.out / "step.md").read_text(), file=sys.stdout)


if __name__ == "__main__":
    end_with_children()
    main()
