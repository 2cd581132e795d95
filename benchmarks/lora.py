"""Time LoRA fine-tuning where a row fits a GPU: ours beside transformers' Trainer, TRL and Unsloth.

    python benchmarks/lora.py --out results/lora --systems ours trainer sft
    python benchmarks/lora.py --out results/lora --gpus 2 --systems ours_fsdp2 trainer
    python benchmarks/lora.py --out results/lora --systems ours unsloth:packages=DIR

A model of a published shape (--model) with random weights in bfloat16, an adapter of rank 16 on all
linear layers, one row of random tokens a step on each GPU, the same on all. `ours` is
LongContextTrainer with everything chosen by itself, which copies the model to each GPU (DDP);
`ours_fsdp2` the same under FSDP2, as `longctx patch` sets it up; `trainer` is
transformers' Trainer, `sft` TRL's SFTTrainer, both with Liger Kernel, SDPA and checkpointing;
`unsloth` is TRL's with Unsloth's model; each as its pages set it up. Set by hand, `trainer_kept`
and `unsloth_kept` recompute nothing, and `unsloth_on_gpu` recomputes as `trainer` does. A system is
a launch of its own. Its first step, on a small row, has to give the loss and the adapter's
gradients of the stock model in one process, which a launch before all computes; otherwise it is
wrong and not timed. That launch writes the weights for all, into $TMPDIR. Writes lora.jsonl and
lora.md into --out.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial

from launch import end_with_children
from launches import make_parser, run_all, run_launch
from measure import Row
from model_shapes import MODELS
from report import NOTE, Column, hardware, heading, is_ok, number, spread, table, write_lines
from step import OUT_OF_MEMORY, without_packages

BY_HAND = ("trainer_kept", "unsloth_kept", "unsloth_on_gpu")
NAMES = ("ours", "ours_fsdp2", "trainer", "sft", "unsloth")
REFERENCE = "reference"
PASSED_ON = ("tokens", "check_tokens", "steps", "model", "num_layers")
COLUMNS = (
    Column("system", lambda row: row["system"]),
    number("tokens", "num_tokens", "{:,.0f}"),
    number("s/step", "seconds", "{:.3f}"),
    spread("s"),
    number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    number("reserved GiB", "peak_reserved_gib", "{:.1f}"),
    Column("first loss", lambda row: f"{row['losses'][0]:.4f}" if is_ok(row) else None),
    Column("worst gradient", lambda row: worst_gradient(row)),
    NOTE,
)


def worst_gradient(row: Row) -> str | None:
    """How far the adapter's gradients are from those of one process, at most."""
    found = row.get("check", {}).get("differences", {})
    errors = [error for name, error in found.items() if name != "loss"]
    return f"{max(errors):.1%}" if errors else None


def run_system(
    arguments: argparse.Namespace, system: str, turn: int, before: Sequence[Row], limit_s: float
) -> list[Row]:
    """The rows of one launch, and one more if the launch failed."""
    system, packages = without_packages(system)
    expected = [row["one_process"] for row in before if row["status"] == REFERENCE]
    settings = {
        "system": system,
        "weights": arguments.weights,
        "one_process": expected[0] if expected else None,
        **{name: getattr(arguments, name) for name in PASSED_ON},
    }
    name = f"lora.{turn:02}.{system}"
    alone = argparse.Namespace(**vars(arguments) | {"gpus": 1})
    on = alone if system == REFERENCE else arguments
    rows, ending = run_launch("lora_job.py", name, settings, on, limit_s, packages)
    if ending.problem is not None:
        status = OUT_OF_MEMORY if "OutOfMemoryError" in ending.problem else "failed"
        rows.append({"system": system, "status": status, "reason": ending.problem})
    return rows


def write_report(arguments: argparse.Namespace, rows: Sequence[Row], where: Row) -> None:
    write_lines([{**row, "machine": where} for row in rows], arguments.out / "lora.jsonl")
    layers = arguments.num_layers or MODELS[arguments.model]["num_hidden_layers"]
    text = heading(f"LoRA, a row on each GPU: {hardware(where, arguments.gpus)}", where)
    text += f"{arguments.model}, {layers} layers.\n\n"
    shown = [row for row in rows if row["status"] != REFERENCE]
    shown.sort(key=lambda row: row.get("num_tokens", 0))
    (arguments.out / "lora.md").write_text(text + table(COLUMNS, shown))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[16384, 32768], help="default 16384 32768")
    add("--check-tokens", type=int, default=1024, help="of the row compared (default 1024)")
    add("--steps", type=int, default=3, help="timed steps (default 3)")
    add("--systems", nargs="+", default=NAMES, help=f"default {' '.join(NAMES)}")
    add("--model", default="qwen3-8b", choices=MODELS, help="its shape (default qwen3-8b)")
    add("--num-layers", type=int, help="of the model (default: all)")
    parser.set_defaults(gpus=1)
    parsed = parser.parse_args(arguments)
    names = [without_packages(system)[0] for system in parsed.systems]
    if unknown := sorted({*names} - {*NAMES, *BY_HAND}):
        parser.error(f"--systems {' '.join(unknown)}: name {', '.join((*NAMES, *BY_HAND))}.")
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    with tempfile.TemporaryDirectory() as arguments.weights:
        launch, report = partial(run_system, arguments), partial(write_report, arguments)
        run_all("lora", [REFERENCE, *arguments.systems], launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
