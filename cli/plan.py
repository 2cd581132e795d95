"""`longctx plan`: what fits on which GPUs, how fast, and with what memory; needs neither."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from longctx_patch.cli.choice import Choice
from longctx_patch.cli.tokens import Tokens

KINDS = "h200, h100, a100, a100-40"


@click.command("plan")
@click.argument("model")
@click.option("--gpus", required=True, help=f"Such as 4xH200. Kinds: {KINDS}.")
@click.option("--seq-len", type=Tokens(), help="Tokens of a row: 131072, 128K or 1M.")
@click.option("--lora", is_flag=True, help="An adapter, in place of every weight.")
@click.option("--rank", type=click.IntRange(1), help="Its rank [16].")
@click.option(
    "--dtype",
    type=Choice(("float32", "bfloat16")),
    help="That weights are loaded in, as in the recipe [float32].",
)
@click.option("--load-in-4bit", is_flag=True, help="The adapter's frozen weights in 4 bits.")
@click.option("--stock-layers", is_flag=True, help="Without Liger Kernel's norms and SwiGLU.")
@click.option("--host-gib", type=float, help="Memory of a machine's host [not checked].")
@click.option("--max-seq-len", is_flag=True, help="Print the longest row that fits, only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw memory by component.")
def plan_command(
    model: str,
    gpus: str,
    seq_len: int | None,
    lora: bool,
    rank: int | None,
    dtype: Any,
    load_in_4bit: bool,
    stock_layers: bool,
    host_gib: float | None,
    max_seq_len: bool,
    as_json: bool,
    png: Path | None,
) -> None:
    """Predict memory and speed of training MODEL (a hub name, a folder or a config.json).

    Only the config is read. Listed are the ways to share a row over the GPUs, what layers keep,
    what goes to the host, and how many tiles an MLP is computed in, the fastest that fits first.
    docs/results/planner.md says how the numbers come about and how near they are.
    """
    from longctx_patch.choose.search import longest, search
    from longctx_patch.cli import plan_report as report
    from longctx_patch.config import LongContextConfig
    from longctx_patch.hf.layers.fused_layers import LIGER_FAMILIES
    from longctx_patch.hf.model.checks import check_model_config
    from longctx_patch.hf.model.load import load_model_config
    from longctx_patch.hf.model.rope import reachable_length
    from longctx_patch.predict.run.candidate import Job
    from longctx_patch.predict.run.cluster import parse_cluster
    from longctx_patch.predict.run.shape import shape_of

    if seq_len is None and not max_seq_len:
        raise click.UsageError("--seq-len: say how long rows are, or ask --max-seq-len.")
    if png is not None and (seq_len is None or max_seq_len):
        raise click.UsageError(
            f"--png {png}: what is drawn is a row. Add --seq-len, without --max-seq-len."
        )
    if png is not None and png.suffix.lower() != ".png":
        raise click.UsageError(f"--png {png}: it is a PNG. Use a name that ends with .png.")
    if png is not None and not png.absolute().parent.is_dir():
        raise click.UsageError(f"--png {png}: there is no folder {png.parent}. Make it first.")
    if rank is not None and not lora:
        raise click.UsageError(f"--rank {rank}: it is an adapter's. Add --lora.")
    if load_in_4bit and not lora:
        raise click.UsageError("--load-in-4bit: weights of 4 bits are frozen. Add --lora.")
    if load_in_4bit and dtype == "float32":
        raise click.UsageError("--load-in-4bit with --dtype float32: it computes in bfloat16.")
    cluster = parse_cluster(gpus, host_gib)
    config = load_model_config(model)
    check_model_config(config, LongContextConfig())
    job = Job(
        shape=shape_of(config, model),
        cluster=cluster,
        seq_len=seq_len or 2,
        lora=lora,
        lora_rank=rank or 16,
        dtype="nf4" if load_in_4bit else dtype or "float32",
        fsdp=not load_in_4bit,
        fused_layers=not stock_layers and config.model_type in LIGER_FAMILIES,
    )
    most = longest(job)
    if max_seq_len or seq_len is None:
        shown = {"model": model, "gpus": str(cluster), "max_seq_len": most}
        click.echo(json.dumps(shown) if as_json else f"{most:,}")
        if not most:
            click.echo(report.render(search(dataclasses.replace(job, seq_len=1024)), 0), err=True)
        return
    results = search(job)
    if png is not None:
        from longctx_patch.cli.plan_chart import draw

        draw(results, png)
    if as_json:
        click.echo(json.dumps(report.as_json(results, most), indent=1))
    else:
        click.echo(report.render(results, most, reachable_length(config)))
