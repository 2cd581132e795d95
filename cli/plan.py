"""`longctx plan`: what fits on which GPUs, how fast and with how much memory; needs no GPU."""

# option() returns a dataclasses.field, which ruff cannot see
import dataclasses
import json
import shlex
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, get_args

import click

from longctx_patch.cli.arguments import (
    Branches,
    Tokens,
    TrainingOptions,
    flag,
    gone_option,
    option,
    options_of,
)
from longctx_patch.config import HardwareName, LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.rope_facts import possible_kinds, reachable_length
from longctx_patch.planner.job import Job, WeightsDtype, parse_cluster
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.named_models import NAMED

if TYPE_CHECKING:
    from longctx_patch.planner.search import Result

KINDS = ", ".join(get_args(HardwareName))
SHORT_ROW = 1024
"""Tokens of a short row: where no row fits, the report says why not even this one does."""

WIDTHS = (22,) * 5
"""Characters of the cells of the table."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainingOptions):
    """The options of `longctx plan`, as click reads them; None for options not given."""

    gpus: str | None = option(f"Such as 4xH200; H200 is one. Kinds: {KINDS}.")
    seq_len: int | None = option("Tokens of a row: 131072, 128K or 1M.", type=Tokens())
    branches: tuple[int, int] | None = option(
        "Such as 2x4K: 2 rows that share all but their last 4K tokens, apart and as one row.",
        type=Branches(),
    )
    table: bool = flag(
        "The longest rows, up to --seq-len [1M], on 1, 2, 4 and 8 of --gpus [all kinds]."
    )
    stock_layers: bool = flag("Without Liger Kernel's norms and SwiGLU.")
    max_seq_len: bool = flag("Print the longest row that fits, only.")
    as_json: bool = flag("Print JSON on stdout.", "--json")

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""
        self.check_weights()
        if self.table and (self.max_seq_len or self.rows_per_step or self.tokens_per_step):
            raise click.UsageError(
                "--table has the longest rows, each shared by all GPUs: leave out --max-seq-len, "
                "--rows-per-step and --tokens-per-step."
            )
        alone = self.table or self.max_seq_len or self.rows_per_step or self.tokens_per_step
        if self.branches is not None and alone:
            raise click.UsageError(
                "--branches compares a step of one group of rows: leave out --table, "
                "--max-seq-len, --rows-per-step and --tokens-per-step."
            )
        if self.gpus is None and not self.table:
            raise click.UsageError("Missing option '--gpus'.")
        if self.also_train and not self.lora:
            raise ValueError("--also-train with --full: every weight is trained. Leave it out.")
        if self.load_in_4bit and self.dtype == "float32":
            raise ValueError(
                "--load-in-4bit with --dtype float32: it computes in bfloat16. Use that."
            )
        if self.seq_len is None and not (self.max_seq_len or self.table):
            raise click.UsageError("--seq-len: say how long rows are, or ask --max-seq-len.")
        if self.tokens_per_step is not None and self.seq_len is None:
            raise click.UsageError(
                f"--tokens-per-step {self.tokens_per_step} without --seq-len, the tokens of a row. "
                "Add it, or use --rows-per-step."
            )

    def job(self, model: str, config: Any) -> Job:
        """Returns what is to be trained. Raises ValueError for unknown GPUs and models."""
        from longctx_patch.hf.layers.fused_layers import LIGER_FAMILIES
        from longctx_patch.recipes.also_train import also_trained
        from longctx_patch.recipes.models import weights_dtype

        # The planner counts every dtype of 16 bits as bfloat16.
        kept = weights_dtype(config, frozen=self.lora)
        usual: WeightsDtype = "float32" if kept == "float32" else "bfloat16"
        return Job(
            cluster=parse_cluster(self.gpus or "H200", self.host_gib),
            shape=shape_of(config, model),
            seq_len=self.seq_len or SHORT_ROW,
            lora=self.lora,
            lora_rank=self.rank or 16,
            also_train=tuple(also_trained(self.also_train)),
            dtype="nf4" if self.load_in_4bit else self.dtype or usual,
            fsdp=not self.load_in_4bit,
            fused_layers=not self.stock_layers and config.model_type in LIGER_FAMILIES,
            rows_per_step=self.rows_of(self.seq_len or SHORT_ROW),
        )

    def jobs(self, model: str, config: Any) -> list[Job]:
        """The trainings of the table: of an adapter and of every weight, or what was asked of
        them."""
        both = self.lora and not self.load_in_4bit
        every: dict[str, Any] = {"lora": False, "rank": None, "also_train": ()}
        adapter: dict[str, Any] = {"lora": self.lora}
        return [
            dataclasses.replace(self, seq_len=None, **given).job(model, config)
            for given in ([adapter, every] if both else [adapter])
        ]


@click.command("plan", short_help="Predict what fits on which GPUs, and how fast it is.")
@click.argument("model", required=False)
@options_of(PlanOptions)
@gone_option("--png", "the table lists the components, and --json has them of every candidate")
def plan_command(model: str | None, **options: Any) -> None:
    """Predict memory and speed of training MODEL (a hub name, a folder or a config.json).

    Only the config is read. Listed are the ways to share a row over the GPUs, what layers keep,
    what goes to the host, and how many tiles an MLP is computed in, the fastest that fits first.
    The exit code is 1 where nothing fits. With --table and no MODEL the models of
    docs/reference/models.md are listed. docs/results/planner.md says how the numbers come about and
    how near they are.
    """
    from longctx_patch.planner.search import longest, search
    from longctx_patch.recipes.models import check_not_fp8

    asked = PlanOptions(**options)
    asked.check()
    if asked.table:
        _say_table(model, asked)
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL', which only --table needs not.")
    config, is_read = _config_of(model)
    if not is_read:
        click.echo(UNREAD, err=True)
    check_model_config(config, LongContextConfig())
    check_not_fp8(model, config)
    job = asked.job(model, config)
    if asked.branches is not None:
        _say_group(job, *asked.branches, as_json=asked.as_json)
        return
    most = longest(job)
    results = [] if asked.max_seq_len else search(job)
    if asked.max_seq_len:
        _say_longest(job, most, as_json=asked.as_json)
    else:
        reach = reachable_length(config) if is_read else None  # not among the published sizes
        is_beyond = reach is not None and job.seq_len > reach
        kinds = possible_kinds(config)[0] if is_beyond else ()
        rope = "yarn" if "yarn" in kinds else next(iter(kinds), None)
        _say_candidates(asked, results, most, reach)
        if not asked.as_json and any(result.fits for result in results):
            unread = "" if is_read else " (it says whether the length needs --rope)"
            click.echo(f"\nNext{unread}: {next_command(model, asked, results[0], rope)}")
    if not (any(result.fits for result in results) if results else most):
        raise click.exceptions.Exit(1)


UNREAD = (
    "Planned by the model's published sizes, since its config can't be read here. `longctx patch` "
    "reads the config."
)


def _config_of(model: str) -> tuple[Any, bool]:
    """The model's config, and whether it was read: where it can't be, a named model's sizes do."""
    try:
        return load_model_config(model), True
    except ValueError:
        if model not in NAMED:
            raise
        return NAMED[model].config(), False


def next_command(model: str, asked: PlanOptions, best: "Result", rope: str | None) -> str:
    """The `longctx patch` that makes the run folder of what was planned.

    How many GPUs share a row is left to it where all do, or where the rows of a step decide. So is
    the checkpoint policy: `auto` fits wherever another does.

    Args:
        rope: the scaling of RoPE that the length needs; None: none.
    """
    from longctx_patch.recipes.models import base_of_adapter, weights_or_config

    may_be_adapter = asked.lora and model not in NAMED
    first, model = base_of_adapter(model) if may_be_adapter else ("", weights_or_config(model))
    job, way = best.job, best.candidate
    cluster, degree = job.cluster, way.sequence_degree
    words = ["longctx", "patch", model, "--gpus", str(cluster), "--seq-len", str(job.seq_len)]
    nodes = cluster.num_gpus // cluster.gpus_per_node
    is_left = degree == cluster.num_gpus or job.rows_per_step
    given = {
        "--nodes": nodes if nodes > 1 else None,
        "--sequence-degree": None if is_left else degree,
        "--rope": rope,
        "--rank": asked.rank,
        "--also-train": ",".join(job.also_train) or None,
        "--dtype": asked.dtype,
        "--host-gib": None if asked.host_gib is None else f"{asked.host_gib:g}",
        "--rows-per-step": job.rows_per_step or None,
        "--attention-kept": f"{way.attention_kept:g}" if way.attention_kept < 1 else None,
    }
    for name, value in given.items():
        words += [] if value is None else [name, str(value)]
    words += [] if asked.lora else ["--full"]
    words += ["--load-in-4bit"] if asked.load_in_4bit else []
    words += ["--states-on-host"] if way.offload_states else []
    return first + shlex.join([*words, "--data", "DATA", "--out", "run/"])


def _say_table(model: str | None, asked: PlanOptions) -> None:
    """Print the lines of the table as they are found, which takes a moment for each cell."""
    from longctx_patch.cli import plan_table

    if model is None and asked.gpus is None:
        raise click.UsageError("--table: name a kind of --gpus, or a MODEL, or both.")
    kinds = [kind.upper() for kind in MACHINES] if asked.gpus is None else [asked.gpus]
    names = list(NAMED) if model is None else [model]
    configs = {
        each: NAMED[each].config() if each in NAMED else load_model_config(each) for each in names
    }
    found: list[dict[str, Any]] = []
    width = max(map(len, names))

    def say(*cells: str) -> None:
        if not asked.as_json:
            padded = zip(cells, (width, 4, *WIDTHS), strict=False)
            click.echo("  ".join(text.ljust(length) for text, length in padded).rstrip())

    for kind in kinds:
        cluster, counts = parse_cluster(kind), plan_table.counts_of(kind)
        name, note = cluster.hardware.name.upper(), cluster.hardware.note
        say(f"{name} ({note})" if note else name)
        say("", "", *map(str, counts))
        for each, config in configs.items():
            if why := plan_table.why_not(config):
                say(each, why)
                found.append({"model": each, "unpredicted": why})
                continue
            for job in asked.jobs(each, config):
                cells = [
                    plan_table.cell(
                        *(job, f"{count}x{name}"),
                        host_gib=asked.host_gib,
                        most=asked.seq_len or plan_table.MOST,
                    )
                    for count in counts
                ]
                trained = "LoRA" if job.lora else "full"
                say(each, trained, *(cell.text for cell in cells))
                found += [{"model": each, "trained": trained, **cell.as_json()} for cell in cells]
    click.echo(
        json.dumps(found, indent=1)
        if asked.as_json
        else f"\n{fill(plan_table.LEGEND, 100, break_on_hyphens=False)}"
    )


def _say_group(job: Job, count: int, own: int, *, as_json: bool) -> None:
    from longctx_patch.cli import plan_group

    found = plan_group.compare_group(job, count, own)
    given = (job, count, own, found)
    click.echo(
        json.dumps(plan_group.as_json(*given), indent=1) if as_json else plan_group.render(*given)
    )
    if not found:
        raise click.exceptions.Exit(1)


def _say_longest(job: Job, most: int, *, as_json: bool) -> None:
    from longctx_patch.cli.plan_report import render
    from longctx_patch.planner.search import search

    shown = {"model": job.shape.name, "gpus": str(job.cluster), "max_seq_len": most}
    click.echo(json.dumps(shown) if as_json else f"{most:,}")
    if not most:
        click.echo(render(search(dataclasses.replace(job, seq_len=SHORT_ROW)), 0), err=True)


def _say_candidates(
    asked: PlanOptions, results: "list[Result]", most: int, reach: int | None
) -> None:
    from longctx_patch.cli import plan_report

    if asked.as_json:
        click.echo(json.dumps(plan_report.as_json(results, most), indent=1))
    else:
        click.echo(plan_report.render(results, most, reach))
