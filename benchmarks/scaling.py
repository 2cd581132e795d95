"""Time training steps over 1, 2 and 4 GPUs of one machine, each beside what the planner predicts.

    python benchmarks/scaling.py --out results/ --gpus 4

A run is `GPUs system:options`, with the systems of step.py. By default: one row over all GPUs, by
Ulysses and by hybrids of it with a ring, rows side by side under FSDP2 and HSDP, and LoRA with a
copy of the model on each GPU. Every run has rows of --tokens for each GPU that shares one, and rows
of --total. A system is first compared with one process on a small row, and its first loss at each
length with that of the run before it of the same length, as in step.py. A run that wants more GPUs
than there are is left out, which the report says. Writes scaling.jsonl, scaling.md and, with
matplotlib, scaling.png into --out.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from config_text import config_of, options_of
from launch import end_with_children
from launches import check_all, make_parser, run_all, run_launch
from measure import Row
from model_shapes import MODELS, model_shape
from report import NOTE, Column, hardware, heading, is_ok, number, table, write_lines
from step import first_losses

from longctx_patch import LongContextConfig
from longctx_patch.planner.job import Cluster, Job
from longctx_patch.planner.machines import GIB, Hardware, machine_of
from longctx_patch.planner.search import result_of

DEFAULT = (
    "1 ours:checkpoint=auto",
    "2 ours:checkpoint=auto,ulysses=2",
    "4 ours:checkpoint=auto,ulysses=4",
    "4 ours:checkpoint=auto,ulysses=2,ring=2",
    "4 ours:checkpoint=auto,ring=4,plan=double_ring,ranks_per_node=2",
    "4 ours:checkpoint=auto,ulysses=2",
    "4 ours:checkpoint=auto,ulysses=2,shards=row",
    "1 ours:checkpoint=auto,lora=true",
    "2 ours:checkpoint=auto,lora=true,ulysses=2,shards=none",
    "4 ours:checkpoint=auto,lora=true,ulysses=2,shards=none",
    "4 ours:checkpoint=auto,lora=true,ulysses=4,shards=none",
)
OWN_OPTIONS = ("layers", "reshard", "rows", "weights", "shards", "lora")
"""Those of systems/ours.py that are no fields of the config."""
COLUMNS = (
    Column("GPUs", lambda row: row["gpus"]),
    Column("system", lambda row: row["system"]),
    number("tokens of a row", "num_tokens", "{:,.0f}"),
    number("s/step", "seconds", "{:.3f}"),
    number("predicted", "predicted_s", "{:.3f}"),
    number("off", "seconds_off", "{:+.1%}"),
    number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    number("model TFLOP/s/GPU", "model_tflops_per_s_per_gpu", "{:.0f}"),
    number("of one GPU", "of_one_gpu", "{:.1%}"),
    number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    number("predicted GiB", "predicted_gib", "{:.1f}"),
    number("off", "peak_off", "{:+.1%}"),
    Column("first loss", lambda row: f"{row['losses'][0]:.4f}" if row.get("losses") else None),
    NOTE,
)


def parts_of(run: str) -> tuple[int, str]:
    """(GPUs, the system). Raises ValueError for a run that can't be read."""
    count, _, system = run.partition(" ")
    if not count.isdigit() or int(count) < 1 or not system.startswith("ours"):
        raise ValueError(f"--runs {run!r}: write GPUs and a system, as '4 ours:ulysses=4'.")
    config_in(system)
    return int(count), system


def config_in(system: str) -> LongContextConfig:
    given = options_of(system.partition(":")[2])
    kept = [f"{name}={value}" for name, value in given.items() if name not in OWN_OPTIONS]
    return config_of(",".join(kept))


def run_one(
    arguments: argparse.Namespace, run: str, turn: int, before: Sequence[Row], limit_s: float
) -> list[Row]:
    """The rows of one launch, one for each length, each with its prediction."""
    count, system = parts_of(run)
    who = {"gpus": count, "system": system}
    there = torch.cuda.device_count() if torch.cuda.is_available() else arguments.gpus
    if count > min(there, arguments.gpus):
        reason = f"{count} GPUs are wanted, and {min(there, arguments.gpus)} are there"
        return [who | {"status": "not run", "reason": reason}]
    degree = config_in(system).sequence_degree
    settings = {
        "system": system,
        "tokens": sorted({arguments.tokens * degree, arguments.total}),
        "expected_losses": first_losses(before),
        "check_tokens": min(4096, arguments.tokens),
        "profile": False,
        **{name: getattr(arguments, name) for name in ("model", "num_layers", "steps")},
    }
    alone = argparse.Namespace(**vars(arguments) | {"gpus": count})
    rows, ending = run_launch("step_job.py", f"scaling.{turn:02}", settings, alone, limit_s)
    if ending.problem is not None:
        rows.append({"status": "failed", "reason": ending.problem})
    return [who | row | predicted(count, system, arguments, row) for row in rows]


def predicted(count: int, system: str, arguments: argparse.Namespace, row: Row) -> Row:
    """What the planner says of a run, and how far that is from a measured row; nothing of HSDP,
    which it doesn't know."""
    machine, options = this_machine(), options_of(system.partition(":")[2])
    if machine is None or not is_ok(row) or options.get("shards") == "row":
        return {}
    is_sharded = count > 1 and options.get("shards") != "none"
    job = Job(
        shape=model_shape(vars(arguments)),
        cluster=Cluster(hardware=machine, num_gpus=count),
        seq_len=row["num_tokens"],
        lora=bool(options.get("lora")),
        fsdp=is_sharded,
        fused_layers=options.get("layers") == "liger",
        clips=False,
    )
    found = result_of(job, config_in(system))
    seconds, peak = found.time.total, found.memory.total / GIB
    return {
        "predicted_s": seconds,
        "seconds_off": seconds / row["seconds"] - 1,
        "predicted_gib": peak,
        "peak_off": peak / row["peak_allocated_gib"] - 1,
    }


def this_machine() -> Hardware | None:
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    return machine_of(properties.name, properties.total_memory)


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Rows with their FLOP rate over that of one GPU that trains as much of the model and has as
    many tokens of its own."""
    name = "model_tflops_per_s_per_gpu"
    alone = {key_of(row): row[name] for row in rows if is_ok(row) and row["gpus"] == 1}
    return [
        row | {"of_one_gpu": row[name] / alone[key_of(row)]}
        if is_ok(row) and key_of(row) in alone
        else row
        for row in rows
    ]


def key_of(row: Row) -> tuple[bool, int]:
    """(whether an adapter is trained, tokens that a GPU has of its row)."""
    degree = config_in(row["system"]).sequence_degree
    return "lora=true" in row["system"], row["num_tokens"] // degree


def write_report(arguments: argparse.Namespace, rows: Sequence[Row], where: Row) -> None:
    rows = with_efficiency(rows)
    write_lines([{**row, "machine": where} for row in rows], arguments.out / "scaling.jsonl")
    text = heading(f"Steps over several GPUs: {hardware(where, arguments.gpus)}", where)
    text += f"{arguments.model}, {arguments.num_layers} layers.\n\n{table(COLUMNS, rows)}"
    (arguments.out / "scaling.md").write_text(text)
    draw(arguments, [row for row in rows if is_ok(row)])


def draw(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """FLOP rates by GPUs, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for lora, marker in ((False, "o"), (True, "x")):
        mine = [row for row in rows if key_of(row)[0] is lora]
        for is_total, colour in ((False, "C0"), (True, "C1")):
            chosen = [row for row in mine if (row["num_tokens"] == arguments.total) is is_total]
            label = f"{'LoRA' if lora else 'full'}, " + (
                f"rows of {arguments.total:,}" if is_total else f"{arguments.tokens:,} a GPU"
            )
            axes.plot(
                [row["gpus"] for row in chosen],
                [row["model_tflops_per_s_per_gpu"] for row in chosen],
                f"{colour}{marker}",
                label=label,
            )
    axes.set(xlabel="GPUs", ylabel="model TFLOP/s of a GPU", ylim=(0, None))
    axes.legend()
    figure.savefig(arguments.out / "scaling.png", dpi=120)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=65536, help="of a row for each GPU of it (default 65536)")
    add("--total", type=int, default=131072, help="of a row, on any number of GPUs (131072)")
    add("--runs", nargs="+", default=DEFAULT, help="'GPUs system:options' (default: all)")
    add("--steps", type=int, default=5, help="timed steps (default 5)")
    add("--model", default="llama-8b", choices=MODELS, help="its shape (default llama-8b)")
    add("--num-layers", type=int, default=8, help="of the model (default 8)")
    parsed = parser.parse_args(arguments)
    check_all(parser, parts_of, parsed.runs)
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    launch, report = partial(run_one, arguments), partial(write_report, arguments)
    run_all("scaling", arguments.runs, launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
