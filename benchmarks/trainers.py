"""Time trainers and the text recipe over long rows beside a plain loop, on the GPUs of one machine.

    python benchmarks/trainers.py --out results/ --gpus 2 --tokens 65536

Systems: `loop`, a plain loop over shards; `recipe`, the text recipe, whose lines of metrics.jsonl
are its clock; `trainer`, LongContextTrainer over whole rows; `sft` and `dpo`, TRL's trainers with
LongContextTrainerMixin; `sft_context_parallel`, SFTTrainer under Accelerate's context parallelism,
the peer. `loop:2` takes two rows a step, as a pair of DPO is; `group:8` the log-probabilities of
eight answers to one prompt; `grpo:8` a step of GRPOTrainer over four such groups without their
generation, and `grpo_by_prompt:8` with `group_by_prompt`. `dpo_stock` and `group_stock:8` are TRL's
own, on one GPU. --prompt says how many tokens such rows begin alike with. A name may end in a
checkpoint policy (`sft_context_parallel,offload` is TRL's long-context recipe), and then in
`share_prefixes` (`dpo,auto,always`).
The first loss of each has to be that of the stock model in one process on the same row (log 2 for
DPO, the first entropy for GRPO); otherwise it is wrong. Writes trainers.jsonl and trainers.md into
--out.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from launch import end_with_children
from launches import make_parser, run_all, run_launch
from measure import Row
from model_shapes import MODELS
from report import NOTE, Column, hardware, heading, number, spread, table, write_lines

DEFAULT = (
    "loop,auto",
    "recipe,auto",
    "trainer,auto",
    "sft,auto",
    "loop:2,auto",
    "dpo,auto",
    "sft_context_parallel,offload",
    "sft_context_parallel,full",
    "sft_context_parallel,none",
)
TOLERANCE = 2e-2
"""How far the first loss may be off, relative: bfloat16."""
COLUMNS = (
    Column("system", lambda row: row["name"]),
    number("s/step", "seconds", "{:.3f}"),
    spread("s"),
    number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    number("first loss", "first_loss", "{:.4f}"),
    number("one process", "wanted", "{:.4f}"),
    NOTE,
)


def run_system(
    arguments: argparse.Namespace, name: str, turn: int, before: Sequence[Row], limit_s: float
) -> list[Row]:
    """The row of one launch."""
    what, *given = name.split(",")
    checkpoint, share = (*given, *("auto", "off")[len(given) :])
    system, _, rows = what.partition(":")
    settings = {
        "system": system,
        "rows": int(rows or 1),
        "checkpoint": checkpoint,
        "share_prefixes": share,
        "prompt": arguments.prompt or arguments.tokens // 64,
        **{key: getattr(arguments, key) for key in ("tokens", "steps", "model", "num_layers")},
    }
    label = f"trainers.{turn:02}.{system}"
    found, ending = run_launch("trainers_job.py", label, settings, arguments, limit_s)
    if not found:
        return [{"name": name, "status": "failed", "reason": ending.problem}]
    return [checked({"name": name, **found[0]})]


def checked(row: Row) -> Row:
    """The row, as wrong if its first loss is not that of one process."""
    wanted = math.log(2) if row["system"].startswith("dpo") else row["alone"]
    row["wanted"] = wanted
    if abs(row["first_loss"] / wanted - 1) <= TOLERANCE:  # nor NaN
        return row
    reason = f"the first loss is {row['first_loss']:.4f}, one process has {wanted:.4f}"
    return row | {"status": "wrong", "reason": reason}


def write_report(arguments: argparse.Namespace, rows: Sequence[Row], where: Row) -> None:
    who = {"num_ranks": arguments.gpus, "machine": where}
    write_lines([{**row, **who} for row in rows], arguments.out / "trainers.jsonl")
    text = heading(f"TRL's trainers: {hardware(where, arguments.gpus)}", where)
    text += f"{arguments.model}, {arguments.num_layers} layers, {arguments.tokens:,} tokens.\n\n"
    (arguments.out / "trainers.md").write_text(text + table(COLUMNS, rows))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=65536, help="of a row (default 65536)")
    add("--prompt", type=int, help="tokens of the prompt of dpo and group (default: a 64th)")
    add("--steps", type=int, default=5, help="timed steps (default 5)")
    add("--systems", nargs="+", default=DEFAULT, help="default: all")
    add("--model", default="llama-8b", choices=MODELS, help="its shape (default llama-8b)")
    add("--num-layers", type=int, default=8, help="of the model (default 8)")
    return parser.parse_args(arguments)


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    launch, report = partial(run_system, arguments), partial(write_report, arguments)
    run_all("trainers", arguments.systems, launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
