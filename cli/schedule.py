"""`longctx schedule`: what a plan of attention takes on a machine, as numbers and as a picture."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from longctx_patch.cli.choice import Choice
from longctx_patch.cli.timeline import check_drawable, draw, time_text
from longctx_patch.config import HardwareName, LongContextConfig, PlanName

if TYPE_CHECKING:
    from longctx_patch.plans.generators.setting import Setting
    from longctx_patch.predict.attention.costs import Prediction, Workload
    from longctx_patch.predict.machines import Hardware

ULYSSES = "ulysses"
"""All ranks exchange heads and none is left for a ring; not a plan of the ring part."""

PLANS = (*get_args(PlanName), ULYSSES)
DIRECTIONS = ("forward", "backward")


def _positive(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise click.BadParameter(f"{value}: a whole number, 1 or more. Use {option.opts[0]} 1.")
    return value


def _number(name: str, help: str, **options: Any) -> Any:
    return click.option(name, type=int, callback=_positive, help=help, **options)


@click.command("schedule")
@click.option("--plan", type=Choice(PLANS), help="The plan to predict.")
@click.option("--compare", is_flag=True, help="Predict all plans; say which is chosen, and why.")
@_number("--ranks", "Ranks that share a sequence.", required=True)
@click.option("--direction", type=Choice(DIRECTIONS), help="[forward; --compare: both]")
@_number("--ulysses", "Ulysses degree; the plan runs over the other ranks [1].")
@_number("--ranks-per-node", "Ranks on one machine [as many as the hardware has GPUs].")
@_number("--heads", "Query heads.", default=32, show_default=True)
@_number("--kv-heads", "Key-value heads.", default=8, show_default=True)
@_number("--head-dim", "Size of a head.", default=128, show_default=True)
@_number("--seq-len", "Tokens of a sequence.", default=131072, show_default=True)
@_number("--batch", "Sequences.", default=1, show_default=True)
@_number("--document-tokens", "Rows are packed of documents of so many tokens, about.")
@_number("--window", "Keys that a token sees at most, itself included.")
@click.option(
    "--hardware",
    "hardware_name",
    type=Choice(get_args(HardwareName)),
    default="h100",
    show_default=True,
    help="Kind of GPU.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Picture to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def schedule_command(
    plan: str | None,
    compare: bool,
    ranks: int,
    direction: str | None,
    ulysses: int | None,
    ranks_per_node: int | None,
    hardware_name: HardwareName,
    out: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Predict the time, waiting and traffic of one attention layer's schedule, without any GPU.

    With --out, draw who computes and receives what at which time (.png, .svg or .pdf). bfloat16
    tensors and a causal mask are assumed, within documents and a window if any; lengths of
    documents are log-normal. docs/explanation/plans.md shows every plan.
    """
    try:
        _check_question(plan, compare, ulysses, out)
        if out is not None:
            check_drawable(out, ranks)
        hardware = read_hardware(hardware_name, ranks_per_node)
        workload = read_workload(**sizes)
        if plan is None:
            _compare(workload, hardware, ranks, direction, as_json)
        else:
            if plan == "burst" and direction != "backward":
                click.echo("burst is a plan of backward; its forward is the zigzag ring.", err=True)
            setting = make_setting(plan, ranks, ulysses, workload, hardware)
            _predict(setting, direction or "forward", workload, hardware, out, as_json)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error


def make_setting(
    plan: str, ranks: int, ulysses: int | None, workload: "Workload", hardware: "Hardware"
) -> "Setting":
    """What a config with this plan runs over `ranks`, of which `ulysses` exchange heads.

    Raises ValueError.
    """
    from longctx_patch.choose.plans import decide

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
    name: PlanName = "zigzag" if plan == ULYSSES else plan  # type: ignore[assignment]
    per_node = _inner_ring(ring, degree, hardware) if plan == "double_ring" else None
    config = LongContextConfig(
        ulysses_degree=degree, ring_degree=ring, plan=name, ranks_per_node=per_node
    )
    return decide(config, workload, hardware)


def read_hardware(name: HardwareName, ranks_per_node: int | None) -> "Hardware":
    """A preset, with this many GPUs in a machine."""
    from longctx_patch.predict.machines import MACHINES

    preset = MACHINES[name]
    return dataclasses.replace(preset, gpus_per_node=ranks_per_node or preset.gpus_per_node)


def read_workload(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_len: int,
    batch: int,
    document_tokens: int | None = None,
    window: int | None = None,
) -> "Workload":
    """The sizes of one attention layer. Raises ValueError for heads that don't group."""
    from longctx_patch.predict.attention.costs import Workload
    from longctx_patch.sequence.documents import Documents

    mean = min(document_tokens or seq_len, seq_len)
    return Workload(
        num_tokens=seq_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        lengths=Documents.typical(seq_len, mean).lengths if document_tokens else (),
        window=window,
    )


def describe(workload: "Workload", hardware: "Hardware") -> str:
    """What was assumed, on one line."""
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    heads = f"{workload.num_heads} / {workload.num_kv_heads} heads of {workload.head_dim}"
    seen = f", {len(workload.lengths)} documents" if len(workload.lengths) > 1 else ""
    seen += f", a window of {workload.window:,}" if workload.window else ""
    return f"{batch}{workload.num_tokens:,} tokens{seen}, {heads}, bfloat16, {hardware.name}"


def _check_question(plan: str | None, compare: bool, ulysses: int | None, out: Path | None) -> None:
    if compare == (plan is not None):
        given = f"--compare with --plan {plan}" if compare else "neither --plan nor --compare"
        raise ValueError(
            f"{given}: one of them says what to predict. Use --plan NAME or --compare."
        )
    if compare and out is not None:
        raise ValueError(
            f"--compare with --out {str(out)!r}: a picture shows one plan. Use --plan NAME with "
            "--out, or leave --out out."
        )
    if compare and ulysses is not None:
        raise ValueError(
            f"--compare with --ulysses {ulysses}: the degrees are compared too. Leave --ulysses "
            "out, or use --plan NAME with it."
        )


def _inner_ring(ring: int, ulysses: int, hardware: "Hardware") -> int:
    """Ring ranks of a machine, in which Ulysses ranks are consecutive."""
    per_node = hardware.gpus_per_node
    if per_node % ulysses == 0 and ring % (per_node // ulysses) == 0:
        return per_node // ulysses
    fitting = [ulysses * count for count in _divisors(ring)]
    raise ValueError(
        f"--plan double_ring with {per_node} ranks per node ({hardware.name}'s, or as given), "
        f"--ranks {ring * ulysses} and --ulysses {ulysses}: machines must be filled, each with "
        f"whole Ulysses groups. Use {_one_of('--ranks-per-node', fitting)}."
    )


def _predict(
    setting: "Setting",
    direction: str,
    workload: "Workload",
    hardware: "Hardware",
    out: Path | None,
    as_json: bool,
) -> None:
    from longctx_patch.plans import Direction
    from longctx_patch.predict.attention.costs import predict

    prediction = predict(
        setting, Direction(direction), workload, hardware, with_timeline=out is not None
    )
    caption = describe(workload, hardware)
    if out is not None:
        draw(prediction, out, caption=caption)
        click.echo(f"Drawn to {out}", err=True)
    if as_json:
        click.echo(json.dumps(prediction.as_json(), allow_nan=False))
    else:
        click.echo(render(prediction, caption))


def _compare(
    workload: "Workload", hardware: "Hardware", ranks: int, direction: str | None, as_json: bool
) -> None:
    from longctx_patch.choose.compare import compare
    from longctx_patch.plans import Direction

    directions = [Direction(name) for name in ([direction] if direction else DIRECTIONS)]
    comparison = compare(workload, hardware, ranks, directions)
    if as_json:
        rows = [row.as_json() for row in comparison.rows]
        click.echo(json.dumps(rows, allow_nan=False))
    else:
        click.echo(f"{describe(workload, hardware)}, {ranks} ranks\n\n{comparison}")


def render(prediction: "Prediction", caption: str) -> str:
    """A few lines for people."""
    from longctx_patch.cli.units import size_text

    degrees = f"Ulysses {prediction.ulysses_degree}, " if prediction.ulysses_degree > 1 else ""
    rows = [
        ("makespan", time_text(prediction.makespan_s), ""),
        ("idle", f"{100 * prediction.idle_fraction:.1f} %", "of rank-time, if only FLOPs counted"),
        ("exposed", time_text(prediction.exposed_communication_s), "gone if messages took no time"),
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
        ]
    )


def _ends(values: tuple[int, ...]) -> tuple[int, int]:
    return min(values), max(values)


def _range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _one_of(option: str, values: list[int]) -> str:
    return f"{option} {' or '.join(map(str, values))}"
