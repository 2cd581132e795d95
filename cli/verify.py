"""`longctx verify`: compare patched processes with one process, on this machine's CPU."""

# ruff: noqa: RUF009  # option() returns a dataclasses.field, which ruff cannot see
import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from longctx_patch.cli.arguments import Choice, flag, option, options_of
from longctx_patch.config import LongContextConfig
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.load_config import load_model_config
from longctx_patch.memory.policies import POLICIES, CheckpointPolicy
from longctx_patch.recipes.run_record import settings_file_of
from longctx_patch.rules.text_table import aligned
from longctx_patch.sequence.layout import LayoutName

if TYPE_CHECKING:
    from longctx_patch.verification import Report

DEFAULT_LAYOUTS: tuple[LayoutName, ...] = ("zigzag", "contiguous")
PACKED_LAYOUTS: tuple[LayoutName, ...] = ("balanced", *DEFAULT_LAYOUTS)
COLUMNS = ("plan", "ulysses", "ring", "layout", "loss", "logits", "worst grad", "grad norm")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Holds what is verified: a model's config and, for a run folder, how the run cuts its rows."""

    model_config: Any
    run: LongContextConfig | None = None
    packed: bool = False
    """Whether the run packs its rows."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `longctx verify`, as click reads them; None for options not given."""

    nproc: int | None = option("Processes [4, or what degrees or run need].")
    ulysses: int | None = option("Ulysses degree [every one that fits].")
    ring: int | None = option("Ring degree [every one that fits].")
    layout: LayoutName | None = option("Layout [zigzag, contiguous; balanced too if packed].")
    dtype: Literal["float32", "float64"] | None = option(
        "What all is computed in [float32; float64 where layers are recurrent]."
    )
    seq_len: int | None = option("Tokens of a row [127, a prime].", type=click.IntRange(3))
    checkpoint: CheckpointPolicy | None = option("Policy [none].", type=Choice(list(POLICIES)))
    packed: bool = flag("Rows of several documents [as the run has them].")

    @property
    def asked_ranks(self) -> int | None:
        """The product of the degrees that were given; None if none was."""
        return (self.ulysses or 1) * (self.ring or 1) if self.ulysses or self.ring else None


@click.command("verify", short_help="Compare a patched model with one process.")
@click.argument("target", metavar="MODEL_OR_RUN")
@options_of(VerifyOptions)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify_command(target: str, as_json: bool, **options: Any) -> None:
    """Check that the patched MODEL (a hub name, folder or config.json) or RUN folder gives the
    loss, logits and gradients of one process.

    Trains one step of a shrunken copy (same heads, RoPE, kinds of layers, softcap and sinks; small
    widths and windows; no weights needed) on gloo processes. With --packed each row holds several
    documents, and the one process runs each document by itself. Models with recurrent layers run in
    float64, since float32 keeps few digits of their gradients. Exit code 0 if all errors are
    within 1e-5 (float64: 1e-10) and what was sent is what the plan predicts, 1 otherwise.
    """
    from longctx_patch.recipes.next_step import next_of
    from longctx_patch.verification import ProcessesFailedError

    started = time.perf_counter()
    try:
        report = run(target, VerifyOptions(**options))
    except (ValueError, ProcessesFailedError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "cases": [], "error": str(error)}))
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_json(), allow_nan=False))
    else:
        click.echo(render(report, time.perf_counter() - started))
        if report.ok and (file := settings_file_of(target)) and (following := next_of(file)):
            click.echo(following)
    raise SystemExit(0 if report.ok else 1)


def run(target: str, options: VerifyOptions) -> "Report":
    """Load the target, decide what to run, and run it."""
    from longctx_patch import verification

    found = load_target(target)
    packed = options.packed or found.packed
    length = {} if options.seq_len is None else {"seq_len": options.seq_len}
    configs = choose_configs(found, options, packed=packed)
    dtype = options.dtype or default_dtype(found.model_config)
    return verification.verify(found.model_config, configs, dtype=dtype, packed=packed, **length)


def default_dtype(model_config: Any) -> str:
    """float64 where float32 keeps too few digits to compare, in the stock model too."""
    return "float64" if ModelFacts.of(model_config).num_recurrent else "float32"


def load_target(target: str) -> Target:
    """Load the model's config; a folder that holds the recipe's settings is a run folder."""
    file = settings_file_of(target)
    if file is None:
        return Target(model_config=load_model_config(target))
    from longctx_patch.recipes.settings import parallelism_in

    run, packed = parallelism_in(file)
    return Target(model_config=load_model_config(target), run=run, packed=packed)


def choose_configs(
    found: Target, options: VerifyOptions, *, packed: bool
) -> list[LongContextConfig]:
    """The run's own config, or in each layout the degrees asked for, or else every pair of them."""
    from longctx_patch.verification import all_configs

    run = found.run
    checkpoint = options.checkpoint or (run.checkpoint if run else "none")
    num_ranks = options.nproc or options.asked_ranks or (run.sequence_degree if run else 4)
    if run and num_ranks == run.sequence_degree and not (options.asked_ranks or options.layout):
        layout = run.packed_placement if packed else run.layout
        return [replace(run, checkpoint=checkpoint, layout=layout)]
    usual = PACKED_LAYOUTS if packed else DEFAULT_LAYOUTS
    layouts = (options.layout,) if options.layout else usual
    if not options.asked_ranks:
        most = getattr(found.model_config, "num_attention_heads", num_ranks)
        return all_configs(num_ranks, layouts=layouts, checkpoint=checkpoint, max_ulysses=most)
    ulysses, ring = asked_degrees(options, num_ranks)
    return [
        LongContextConfig(
            ulysses_degree=ulysses, ring_degree=ring, layout=layout, checkpoint=checkpoint
        )
        for layout in layouts
    ]


def asked_degrees(options: VerifyOptions, num_ranks: int) -> tuple[int, int]:
    """Ulysses and ring degree over `num_ranks`, if at least one of them was given."""
    ulysses, ring, product = options.ulysses, options.ring, options.asked_ranks or 1
    if num_ranks % product or (ulysses and ring and product != num_ranks):
        given = {"--ulysses": ulysses, "--ring": ring}
        words = " ".join(f"{name} {degree}" for name, degree in given.items() if degree)
        raise ValueError(
            f"{words} with --nproc {num_ranks}: the two degrees multiply to the processes. Use "
            f"--nproc {product}, or leave --nproc out."
        )
    return ulysses or num_ranks // product, ring or num_ranks // product


def render(report: "Report", seconds: float) -> str:
    """The table of cases, and the verdict."""
    rows: list[list[str]] = [[*COLUMNS, "messages", "bytes", ""]]
    for case in report.cases:
        errors = (case.loss_rel_err, case.logits_rel_err, case.grad_rel_err, case.grad_norm_rel_err)
        verdict = "ok" if case.ok else "WRONG"
        if not case.traffic_as_predicted:
            verdict += f" (plan: {case.predicted_messages} messages, {case.predicted_bytes} bytes)"
        cut = [case.plan, str(case.ulysses), str(case.ring), case.layout]
        sent = [str(case.messages), str(case.bytes)]
        rows.append([*cut, *(f"{error:.1e}" for error in errors), *sent, verdict])
    good = sum(case.ok for case in report.cases)
    head = (
        f"{report.model_type}, small layers, {report.seq_len} tokens, {report.num_ranks} "
        f"process(es) against one, {report.dtype}; relative errors, tolerance {report.tolerance:g}"
    )
    masks = f"mask: {' | '.join(dict.fromkeys(case.mask for case in report.cases))}"
    verdict = "equal to one process" if report.ok else "NOT equal to one process"
    tail = f"verify: {'ok' if report.ok else 'FAILED'}: {good} of {len(report.cases)} cases "
    return "\n".join([head, masks, "", *aligned(rows), "", f"{tail}{verdict} ({seconds:.0f} s)"])
