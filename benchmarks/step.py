"""Time a training step over long rows on the GPUs of one machine: ours, others, and the floor.

    python benchmarks/step.py --out results/                               # everything, 4 GPUs
    python benchmarks/step.py --out results/ --tokens 131072 --systems ours:ulysses=4 alst --profile
    python benchmarks/step.py --out results/ --gpus 1 --tokens 32768

A model of a published shape (--model, with fewer layers) and random weights, full fine-tuning with
AdamW, one row of random tokens. A system is `name:option=value,...`, with the options that
benchmarks/systems/NAME.py lists, and a launch of its own with its own time limit. It first makes a
step on a small row, which has to give the loss and the gradients of one process, and its first loss
at each length has to be that of the first of ours; otherwise it is wrong and not timed. Writes
step.jsonl and step.md into --out; benchmarks/README.md says more.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from config_text import options_of
from launch import end_with_children
from launches import check_all, make_parser, run_all, run_launch
from measure import Row
from model_shapes import MODELS
from report import (
    NOTE,
    Column,
    hardware,
    heading,
    is_ok,
    number,
    spread,
    table,
    write_lines,
)
from step_profile import PARTS

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
    """Systems to run; ours come first, since the others' losses are compared with theirs."""
    if num_gpus == 1:
        return ONE_GPU
    ours = [f"ours:ulysses={num_gpus},checkpoint={policy}" for policy in ("auto", "attention")]
    ours += [f"{ours[0]},layers={layers}" for layers in ("liger", "compile")]
    ours += [f"ours:ring={num_gpus},checkpoint=auto"]
    return (*ours, *PEERS)


PASSED_ON = ("model", "num_layers", "steps", "check_tokens", "floor_kernels")
"""Options that are passed on unchanged to the processes of a launch."""


def run_system(
    arguments: argparse.Namespace, system: str, turn: int, before: Sequence[Row], limit_s: float
) -> list[Row]:
    """The rows of one launch, and one more if the launch failed."""
    system, packages = without_packages(system)
    settings = {
        "system": system,
        "tokens": sorted(arguments.tokens),
        "expected_losses": first_losses(before),
        **{name: getattr(arguments, name) for name in PASSED_ON},
        "profile": arguments.profile and system.startswith("ours"),
    }
    script = "step_floor_job.py" if system == FLOOR else "step_job.py"
    name = f"step.{turn:02}.{system.partition(':')[0]}"
    rows, ending = run_launch(script, name, settings, arguments, limit_s, packages)
    if ending.problem is not None and not any(row["status"] == OUT_OF_MEMORY for row in rows):
        status = OUT_OF_MEMORY if "OutOfMemoryError" in ending.problem else "failed"
        rows.append({"system": system, "status": status, "reason": ending.problem})
    return rows


def without_packages(system: str) -> tuple[str, str | None]:
    """(the system without its option `packages`, the value of that)."""
    name, colon, options = system.partition(":")
    kept = [option for option in options.split(",") if not option.startswith("packages=")]
    folder = options_of(options).get("packages")
    return f"{name}{colon if any(kept) else ''}{','.join(kept)}", folder


def first_losses(rows: Sequence[Row]) -> dict[int, float]:
    """By length, the first loss of the first of our systems that was timed."""
    found: dict[int, float] = {}
    for row in rows:
        if row["system"].startswith("ours") and is_ok(row):
            found.setdefault(row["num_tokens"], row["losses"][0])
    return found


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with their share of the floor, and their speed over that of the best other system."""
    floors = {r["num_tokens"]: r["seconds"] for r in rows if r["system"] == FLOOR and is_ok(r)}
    best: dict[int, float] = {}
    for row in rows:
        if is_ok(row) and row["system"] != FLOOR and not row["system"].startswith("ours"):
            tokens = row["num_tokens"]
            best[tokens] = min(best.get(tokens, row["seconds"]), row["seconds"])
    ratios = []
    for row in rows:
        extra = {}
        for name, of in (("share_of_floor", floors), ("speedup_over_best_peer", best)):
            if is_ok(row) and row["system"] != FLOOR and row["num_tokens"] in of:
                extra[name] = of[row["num_tokens"]] / row["seconds"]
        ratios.append({**row, **extra})
    return ratios


COLUMNS = (
    Column("system", lambda row: row["system"]),
    number("s/step", "seconds", "{:.3f}"),
    spread("s"),
    number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    number("model TFLOP/s/GPU", "model_tflops_per_s_per_gpu", "{:.0f}"),
    number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    number("reserved GiB", "peak_reserved_gib", "{:.1f}"),
    number("x best peer", "speedup_over_best_peer", "{:.2f}"),
    number("of floor", "share_of_floor", "{:.1%}"),
    Column("first loss", lambda row: f"{row['losses'][0]:.4f}" if row.get("losses") else None),
    NOTE,
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


def write_report(arguments: argparse.Namespace, rows: Sequence[Row], where: Row) -> None:
    """Complete the rows with ratios, and write them with tables."""
    out, rows = arguments.out, with_ratios(rows)
    who = {"num_ranks": arguments.gpus, "machine": where}
    write_lines([{**row, **who} for row in rows], out / "step.jsonl")
    title = f"A training step: {hardware(where, arguments.gpus)}"
    text = heading(title, where)
    text += f"{arguments.model} with {arguments.num_layers} layers.\n\n"
    for num_tokens in sorted(arguments.tokens):
        mine = [row for row in rows if row.get("num_tokens") == num_tokens]
        mine.sort(key=lambda row: (not is_ok(row), row.get("seconds") or 0.0))
        text += f"## {num_tokens:,} tokens\n\n{table(COLUMNS, mine)}\n"
        text += "".join(profile_table(row) for row in mine if row.get("profile"))
    rest = [row for row in rows if "num_tokens" not in row]
    if rest:
        text += f"## Not run to the end\n\n{table((COLUMNS[0], COLUMNS[-1]), rest)}\n"
    (out / "step.md").write_text(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="of the row (default 32768 131072 262144)")
    add("--systems", nargs="+", help="name:option=value,...; ours first (default: all)")
    add("--steps", type=int, default=5, help="timed steps (default 5)")
    add("--check-tokens", type=int, default=4096, help="of the row compared (default 4096)")
    add("--profile", action="store_true", help="of ours: one step by part")
    add("--no-floor", action="store_true", help="leave the floor out")
    add("--floor-kernels", nargs="+", help="default: all fast ones")
    add("--model", default="llama-8b", choices=MODELS, help="its shape (default llama-8b)")
    add("--num-layers", type=int, default=8, help="of the model (default 8)")
    parsed = parser.parse_args(arguments)
    parsed.tokens = parsed.tokens or (ONE_GPU_TOKENS if parsed.gpus == 1 else TOKENS)
    parsed.systems = parsed.systems or default_systems(parsed.gpus)
    check_all(parser, _check_system, parsed.systems)
    return parsed


def _check_system(system: str) -> None:
    """Raise ValueError for an unknown name, or options that can't be read."""
    name, _, options = system.partition(":")
    if "." not in name and name not in (*NAMES, FLOOR):
        raise ValueError(f"--systems {system}: name one of {', '.join(NAMES)}.")
    options_of(options)


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    systems = [*([] if arguments.no_floor else [FLOOR]), *arguments.systems]
    launch, report = partial(run_system, arguments), partial(write_report, arguments)
    run_all("step", systems, launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
