"""`longctx schedule`: what a plan of attention takes on a machine, as numbers and as a picture."""

# ruff: noqa: RUF009  # option() returns a dataclasses.field, which ruff cannot see
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from longctx_patch.cli.arguments import (
    Branches,
    Choice,
    Tokens,
    flag,
    gone_option,
    option,
    options_of,
)
from longctx_patch.cli.timeline import check_drawable, describe, draw
from longctx_patch.config import HardwareName, LongContextConfig
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.compare import compare
from longctx_patch.planner.degrees import decide
from longctx_patch.planner.machines import MACHINES, Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN
from longctx_patch.rules.text_table import size_text, time_text
from longctx_patch.sequence.documents import Documents

ULYSSES = "ulysses"
"""A value of --plan in which all ranks exchange heads, without a ring; it is not in PLANS."""

_OF_MODEL = "heads are those of MODEL, such as a config.json of your own"


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options of `longctx schedule`, as click reads them; None for options not given."""

    plan: str | None = option("The plan to predict.", type=Choice(("auto", *PLANS, ULYSSES)))
    compare: bool = flag("Predict all plans, and mark the chosen one.")
    ranks: int = option("Ranks that share a sequence.", required=True)
    direction: Literal["forward", "backward"] | None = option("[forward; --compare: both]")
    ulysses: int | None = option("Ulysses degree; the plan runs over the other ranks [1].")
    ranks_per_node: int | None = option("Ranks on one machine [as many as the hardware has GPUs].")
    seq_len: int = option("Tokens of a sequence [128K].", type=Tokens(1), default=131072)
    document_tokens: int | None = option("Rows hold documents of about so many.", type=Tokens(1))
    branches: tuple[int, int] | None = option(
        "Such as 8x1K: 8 sequences that share all but their last 1K tokens, as one row.",
        type=Branches(),
    )
    window: int | None = option("Keys that a token sees at most, with itself.", type=Tokens(1))
    hardware: HardwareName = option("Kind of GPU.", default="h100", show_default=True)
    out: Path | None = option("Picture to write.", type=click.Path(path_type=Path, dir_okay=False))
    as_json: bool = flag("Print JSON on stdout.", "--json")

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""
        if self.compare == (self.plan is not None):
            given = f"--compare with --plan {self.plan}" if self.compare else "neither --plan nor"
            given += "" if self.compare else " --compare"
            raise ValueError(
                f"{given}: exactly one of them says what to predict. Use --plan NAME or --compare."
            )
        if self.compare and self.out is not None:
            raise ValueError(
                f"--compare with --out {str(self.out)!r}: a picture shows one plan. Use --plan "
                "NAME with --out, or leave --out out."
            )
        if self.compare and self.ulysses is not None:
            raise ValueError(
                f"--compare with --ulysses {self.ulysses}: the degrees are compared too. Leave "
                "--ulysses out, or use --plan NAME with it."
            )
        if self.branches is not None and self.document_tokens is not None:
            raise ValueError(
                f"--branches with --document-tokens {self.document_tokens}: a row with branches "
                "has a prompt and what goes on from it. Leave one of them out."
            )
        if self.out is not None:
            check_drawable(self.out, self.ranks)

    def workload(self, model: str | None) -> Workload:
        """The sizes of one attention layer, of MODEL or of Llama-3.1-8B (the default of Workload).
        Raises ValueError."""
        row = Documents.one(self.seq_len)
        if self.branches is not None:
            row = Documents.group(self.seq_len, *self.branches)
        elif self.document_tokens is not None:
            row = Documents.typical(self.seq_len, min(self.document_tokens, self.seq_len))
        return Workload(
            num_tokens=row.num_tokens,
            lengths=row.lengths if len(row.lengths) > 1 else (),
            parents=row.parents,
            window=self.window,
            **({} if model is None else _heads_of(model)),
        )


@click.command("schedule", short_help="Predict the schedule of one attention layer.")
@click.argument("model", required=False)
@options_of(ScheduleOptions)
@gone_option("--heads", _OF_MODEL)
@gone_option("--kv-heads", _OF_MODEL)
@gone_option("--head-dim", _OF_MODEL)
@gone_option("--batch", "one sequence is predicted; times and bytes of more grow with their number")
def schedule_command(model: str | None, **options: Any) -> None:
    """Predict the time, waiting and traffic of one attention layer's schedule, without any GPU.

    The layer has the heads of MODEL (a hub name, a folder or a config.json), else Llama-3.1-8B's.
    With --out, draw who computes and receives what at which time (.png, .svg or .pdf), with
    --branches beside a picture of the mask. bfloat16 and
    a causal mask are assumed, within documents and a window if any; lengths of documents are
    log-normal. docs/explanation/plans.md shows every plan.
    """
    asked = ScheduleOptions(**options)
    try:
        asked.check()
        hardware = read_hardware(asked.hardware, asked.ranks_per_node)
        workload = asked.workload(model)
        if asked.plan is None:
            _compare(asked, workload, hardware, _recurrences(model, workload))
        else:
            setting = make_setting(asked.plan, asked.ranks, asked.ulysses, workload, hardware)
            direction = asked.direction or "forward"
            runs = setting.plan_of(Direction(direction))
            if asked.plan in PLANS and asked.plan != runs:
                click.echo(
                    f"The plan {asked.plan} has no {direction} of its own: {runs} runs.", err=True
                )
            _predict(asked, setting, workload, hardware)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error


def _heads_of(model: str) -> dict[str, Any]:
    """The heads of a model as fields of a `Workload`, from its config."""
    facts = ModelFacts.of(load_model_config(model))
    names = ("num_heads", "num_kv_heads", "head_dim", "latent_dim", "expansion")
    return {name: getattr(facts, name) for name in names}


def _recurrences(model: str | None, workload: Workload) -> dict[RecurrentWork, float]:
    """Counts how many recurrent layers the model has for each one with attention, which count in
    the choice of degrees."""
    if model is None:
        return {}
    config = load_model_config(model)
    layers = recurrent_layers(config)
    if layers is None or layers.recurrence is None:
        return {}
    work = RecurrentWork(layers.recurrence, workload.documents())
    return {work: layers.num_layers / len(ModelFacts.of(config).reaches)}


def make_setting(
    plan: str, ranks: int, ulysses: int | None, workload: Workload, hardware: Hardware
) -> Setting:
    """Decide what a config with this plan runs over `ranks`, of which `ulysses` exchange heads.

    Raises ValueError.
    """
    degree = ulysses or (ranks if plan == ULYSSES else 1)
    if ranks % degree:
        raise ValueError(
            f"--ulysses {degree} with --ranks {ranks}: the Ulysses degree must divide the ranks. "
            f"Use {_one_of('--ulysses', _divisors(ranks))}."
        )
    ring = ranks // degree
    if plan == ULYSSES and ring > 1:
        raise ValueError(
            f"--plan ulysses with --ulysses {degree} and --ranks {ranks}: this plan has no ring, "
            f"so all ranks exchange heads. Use --ulysses {ranks}, or name the plan of the ring, "
            "for example --plan zigzag."
        )
    name = "zigzag" if plan == ULYSSES else plan
    needs_nodes = name in PLANS and PLANS[name].needs_full_nodes
    per_node = _inner_ring(name, ring, degree, hardware) if needs_nodes else None
    config = LongContextConfig(
        ulysses_degree=degree, ring_degree=ring, plan=name, ranks_per_node=per_node
    )
    return decide(config, workload, hardware)


def read_hardware(name: HardwareName, ranks_per_node: int | None) -> Hardware:
    """A preset, with this many GPUs in a machine."""
    preset = MACHINES[name]
    return dataclasses.replace(preset, gpus_per_node=ranks_per_node or preset.gpus_per_node)


def _inner_ring(plan: str, ring: int, ulysses: int, hardware: Hardware) -> int:
    """The number of ring ranks of a machine; Ulysses ranks are consecutive in it."""
    per_node = hardware.gpus_per_node
    if per_node % ulysses == 0 and ring % (per_node // ulysses) == 0:
        return per_node // ulysses
    fitting = [ulysses * count for count in _divisors(ring)]
    raise ValueError(
        f"--plan {plan} with {per_node} ranks per node ({hardware.name}'s, or as given), "
        f"--ranks {ring * ulysses} and --ulysses {ulysses}: machines must be filled, each with "
        f"whole Ulysses groups. Use {_one_of('--ranks-per-node', fitting)}."
    )


def _predict(
    asked: ScheduleOptions,
    setting: Setting,
    workload: Workload,
    hardware: Hardware,
) -> None:
    direction = Direction(asked.direction or "forward")
    prediction = predict(
        setting, direction, workload, hardware, with_timeline=asked.out is not None
    )
    caption = describe(workload, hardware)
    if asked.out is not None:
        draw(prediction, asked.out, caption=caption, workload=workload)
        click.echo(f"Drawn to {asked.out}", err=True)
    if asked.as_json:
        click.echo(json.dumps(prediction.as_json(), allow_nan=False))
    else:
        click.echo(render(prediction, caption))


def _compare(
    asked: ScheduleOptions,
    workload: Workload,
    hardware: Hardware,
    recurrent: dict[RecurrentWork, float],
) -> None:
    directions = [Direction(asked.direction)] if asked.direction else list(Direction)
    comparison = compare(workload, hardware, asked.ranks, directions, recurrent)
    if asked.as_json:
        rows = [row.as_json() for row in comparison.rows]
        click.echo(json.dumps(rows, allow_nan=False))
    else:
        click.echo(f"{describe(workload, hardware)}, {asked.ranks} ranks\n\n{comparison}")
        if recurrent:
            click.echo("Recurrent layers count in the choice of degrees, not in the table.")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _one_of(option: str, values: list[int]) -> str:
    return f"{option} {' or '.join(map(str, values))}"


def render(prediction: Prediction, caption: str) -> str:
    """A few lines for people."""
    degrees = f"Ulysses {prediction.ulysses_degree}, " if prediction.ulysses_degree > 1 else ""
    rows = [
        ("makespan", time_text(prediction.makespan_s), "until the last rank is done"),
        (
            "exposed",
            time_text(prediction.exposed_communication_s),
            "lost to messages: waiting, and kernels slower beside them",
        ),
        ("sent", _range([size_text(n) for n in _ends(prediction.bytes_sent_per_rank)]), "per rank"),
        ("messages", _range([str(n) for n in _ends(prediction.messages_per_rank)]), "per rank"),
        ("buffers", size_text(prediction.peak_buffer_bytes), "at most"),
    ]
    width = max(len(value) for _, value, _ in rows)
    return "\n".join(
        [
            f"{prediction.plan} {prediction.direction.value} over {prediction.ranks} ranks "
            f"({degrees}{prediction.layout} tokens)",
            caption,
            "",
            *(f"{name:<9} {value:>{width}}  {why}".rstrip() for name, value, why in rows),
            "",
            _balance(prediction),
        ]
    )


def _balance(prediction: Prediction) -> str:
    """Returns how evenly work is split, and how long GPUs wait in practice.

    Ranks of SPARSE_PLAN, which sends only what some query sees, don't go step by step, so that an
    imbalance by steps would say nothing of them.
    """
    waiting = f"Waiting in practice: {prediction.waiting_fraction:.1%} of the GPUs' time."
    if prediction.plan == SPARSE_PLAN:
        return waiting
    imbalance = prediction.idle_fraction
    evenly = "evenly" if imbalance < 0.005 else "unevenly"
    return f"Work is split {evenly} ({imbalance:.1%} imbalance). {waiting}"


def _ends(values: tuple[int, ...]) -> tuple[int, int]:
    return min(values), max(values)


def _range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
