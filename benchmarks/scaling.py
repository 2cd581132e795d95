"""Time a training step on 1, 2, 4 and 8 GPUs of one machine, beside what the planner predicts.

    python benchmarks/scaling.py --out results/
    python benchmarks/scaling.py --out results/ --gpus 1 2 --tokens-per-gpu 32768 --tokens 65536
    python benchmarks/scaling.py --out results/ --gpus 8 --systems ours:ulysses=4,replicas=2 \\
        ours:ulysses=2,replicas=4,copies=2 ours:ulysses=4,ring=2 ours:ulysses=2,ring=4 \\
        ours:ring=8,plan=double_ring,ranks_per_node=4

Rows of `--tokens-per-gpu` times the GPUs, and rows of `--tokens` on any number of them. Each number
of GPUs is a launch of step.py's processes, which first compare a step on a small row with one
process. GPUs that the machine does not have are said and left out. Writes scaling.jsonl, .md and
.png into --out; the share of one GPU's rate is that of FLOPs, so what grows with the length of the
row is not counted against it.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch
from config_text import NAMES, options_of
from launch import end_with_children
from launches import make_parser, run_all
from measure import Row
from model_shapes import MODELS, model_config
from report import (
    Bars,
    Column,
    hardware,
    heading,
    is_ok,
    number,
    plot,
    spread,
    table,
    write_lines,
)
from step import run_system

from longctx_patch import LongContextConfig
from longctx_patch.choose.search import result_of, usual_tiles
from longctx_patch.predict.machines import GIB
from longctx_patch.predict.run.candidate import Job
from longctx_patch.predict.run.cluster import parse_cluster
from longctx_patch.predict.run.shape import shape_of

KINDS = ("H200", "H100", "A100")
"""GPUs whose rates the planner has, as torch's names of devices contain them."""
OF_STEP_ALONE = ("layers", "reshard", "rows", "replicas", "copies")
"""Options of ours that are no fields of LongContextConfig."""


def degrees(num_gpus: int, num_kv_heads: int) -> str:
    """Options of as many Ulysses ranks as divide the key heads and the GPUs; the rest is a ring."""
    ulysses = max(n for n in range(1, num_gpus + 1) if num_gpus % n == num_kv_heads % n == 0)
    return f"ulysses={ulysses},ring={num_gpus // ulysses}"


def default_system(arguments: Namespace, num_gpus: int) -> str:
    config = model_config(arguments.model, arguments.num_layers, 1)
    return f"ours:{degrees(num_gpus, config.num_key_value_heads)},checkpoint=auto"


def launches_of(arguments: Namespace) -> list[str]:
    """`GPUs system` of each launch: of every number of GPUs that the machine has."""
    found = []
    for num_gpus in sorted(arguments.gpus):
        if num_gpus > arguments.available:
            print(f"{num_gpus} GPUs: this machine has {arguments.available}. Left out.", flush=True)
            continue
        systems = arguments.systems or [default_system(arguments, num_gpus)]
        found += [f"{num_gpus} {system}" for system in systems]
    return found


def run_launch_of(
    arguments: Namespace, name: str, turn: int, before: Sequence[Row], limit_s: float
) -> list[Row]:
    """The rows of one launch, with predictions."""
    gpus, system = name.split(" ", 1)
    lengths = {arguments.tokens_per_gpu * int(gpus), arguments.tokens} - {0}
    given = Namespace(**vars(arguments) | {"gpus": int(gpus), "tokens": sorted(lengths)})
    rows = run_system(given, system, turn, before, limit_s)
    return [{**row, "gpus": int(gpus), **prediction(given, row)} for row in rows]


def prediction(arguments: Namespace, row: Row) -> Row:
    """What the planner says of a row's step; nothing where it knows the GPU or the way not."""
    kind = next((kind for kind in KINDS if kind in arguments.device_name), None)
    options = options_of(row["system"].partition(":")[2])
    if kind is None or "num_tokens" not in row or options.get("copies", 1) != 1:
        return {}
    mine = {NAMES.get(k, k): x for k, x in options.items() if k not in OF_STEP_ALONE}
    config = LongContextConfig(**mine)
    job = Job(
        shape=shape_of(
            model_config(arguments.model, arguments.num_layers, row["num_tokens"]), arguments.model
        ),
        cluster=parse_cluster(f"{arguments.gpus}x{kind}"),
        seq_len=row["num_tokens"],
        fsdp=arguments.gpus > 1,
        dtype="bfloat16",
    )
    result = result_of(
        job,
        ulysses=config.ulysses_degree,
        ring=config.ring_degree,
        checkpoint=config.checkpoint,
        attention_kept=config.attention_kept,
        mlp_tiles=config.mlp_tiles or usual_tiles(job, config.sequence_degree),
    )
    return {
        "predicted_s": result.time.total,
        "predicted_gib": result.memory.total / GIB,
    }


def with_shares(rows: Sequence[Row], tokens_per_gpu: int) -> list[Row]:
    """Rows with their FLOP rate as a share of one GPU's at its length."""
    rates = {
        row["num_tokens"]: row["model_tflops_per_s_per_gpu"]
        for row in rows
        if is_ok(row) and row["gpus"] == 1
    }
    one = rates.get(tokens_per_gpu)
    return [
        {**row, "share_of_one": row["model_tflops_per_s_per_gpu"] / one}
        if one and is_ok(row)
        else row
        for row in rows
    ]


def _off(found: str, predicted: str) -> Column:
    def of(row: Row) -> str | None:
        if not row.get(found) or predicted not in row:  # on the CPU no memory is measured
            return None
        return f"{row[predicted] / row[found] - 1:+.1%}"

    return Column("off", of)


COLUMNS = (
    Column("GPUs", lambda row: row["gpus"]),
    Column("tokens", lambda row: f"{row['num_tokens']:,}" if "num_tokens" in row else None),
    Column("system", lambda row: row["system"]),
    number("s/step", "seconds", "{:.3f}"),
    spread("s"),
    number("predicted s", "predicted_s", "{:.3f}"),
    _off("seconds", "predicted_s"),
    number("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    number("model TFLOP/s/GPU", "model_tflops_per_s_per_gpu", "{:.0f}"),
    number("of one GPU's", "share_of_one", "{:.1%}"),
    number("peak GiB", "peak_allocated_gib", "{:.1f}"),
    number("predicted GiB", "predicted_gib", "{:.1f}"),
    _off("peak_allocated_gib", "predicted_gib"),
    Column("first loss", lambda row: f"{row['losses'][0]:.4f}" if row.get("losses") else None),
    Column("note", lambda row: None if is_ok(row) else f"{row['status']}: {row.get('reason')}"),
)


def write_report(arguments: Namespace, rows: Sequence[Row], where: Row) -> None:
    rows = with_shares(rows, arguments.tokens_per_gpu)
    write_lines([{**row, "machine": where} for row in rows], arguments.out / "scaling.jsonl")
    title = f"Scaling of a training step: {hardware(where, arguments.available)}"
    text = f"{heading(title, where)}{arguments.model} with {arguments.num_layers} layers.\n\n"
    (arguments.out / "scaling.md").write_text(text + table(COLUMNS, rows))
    bars: dict[str, dict[str, float]] = {"a length for each GPU": {}, "one length": {}}
    for row in filter(is_ok, rows):
        kind = "one length" if row["num_tokens"] == arguments.tokens else "a length for each GPU"
        name = f"{row['gpus']} GPUs, {row['num_tokens']:,} tokens, {row['system']}"
        bars[kind][name] = row["tokens_per_s_per_gpu"]
    panels = [Bars(name, "tokens/s/GPU", lengths) for name, lengths in bars.items()]
    plot(panels, arguments.out / "scaling.png", title)


def parse_arguments(command_line: Sequence[str] | None = None) -> Namespace:
    parser = make_parser(__doc__, numbers_of_gpus=(1, 2, 4, 8))
    parser.set_defaults(floor_kernels=None, profile=False)
    add = parser.add_argument
    add("--tokens-per-gpu", type=int, default=65536, help="rows of so many for each GPU (65,536)")
    add("--tokens", type=int, default=131072, help="rows of so many on any number (131,072; 0: no)")
    add("--systems", nargs="+", help="of step.py (default: ours, Ulysses as far as it goes)")
    add("--check-tokens", type=int, default=4096, help="of the row compared (default 4096)")
    add("--steps", type=int, default=5, help="timed steps (default 5)")
    add("--model", default="llama-8b", choices=MODELS, help="its shape (default llama-8b)")
    add("--num-layers", type=int, default=8, help="of the model (default 8)")
    arguments = parser.parse_args(command_line)
    has_gpus = torch.cuda.is_available()
    arguments.available = torch.cuda.device_count() if has_gpus else max(arguments.gpus)
    arguments.device_name = torch.cuda.get_device_name() if has_gpus else "cpu"
    return arguments


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    launch, report = partial(run_launch_of, arguments), partial(write_report, arguments)
    run_all("scaling", launches_of(arguments), launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
