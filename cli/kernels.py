"""`longctx kernels`: which attention kernels this machine has, what the others lack, and the rates
that were measured here."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from longctx_patch.rules.text_table import aligned

if TYPE_CHECKING:
    from longctx_patch.kernels import KernelRequest
    from longctx_patch.kernels.base import Domain
    from longctx_patch.kernels.select.probe import Measured
    from longctx_patch.kernels.select.registry import Record


class Rates(NamedTuple):
    """TFLOP/s of allowed pairs."""

    forward: float
    backward: float


Figures = Mapping[str, Mapping[str, Rates]]
"""Kernel -> case -> rates."""

_AREA = {"causal": 0.5, "full": 1.0}  # share of a block's pairs that is computed


Row = dict[str, Any]
"""All facts about one kernel, as `--json` prints them."""


@click.command("kernels", short_help="List the attention kernels and how fast they are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure again, or not at all. [measured once where a GPU is]",
)
def kernels_command(as_json: bool, measure: bool | None) -> None:
    """List the attention kernels, what each supports, what is missing here, and how fast they are.

    Rates are of blocks of 8,192 tokens in bfloat16 with 32 / 8 heads of 128, on this machine's GPU.
    docs/reference/kernels.md has those of an H200.
    """
    import torch

    if measure and not torch.cuda.is_available():
        raise click.UsageError(
            "--measure without a GPU: torch sees none here. Leave --measure out for the figures of "
            "docs/reference/kernels.md."
        )
    found = report(measure)
    click.echo(json.dumps(found, indent=2, allow_nan=False) if as_json else render(found))


def report(measure: bool | None) -> dict[str, Any]:
    """Returns what `--json` prints. On a GPU, rates are measured: anew, never, or (None) once."""
    import torch

    has_gpu = torch.cuda.is_available()
    request = typical_request("cuda")
    measured = {} if not has_gpu or measure is False else _measured(request, anew=bool(measure))
    return {
        "machine": torch.cuda.get_device_name() if has_gpu else None,
        "auto": _auto("cuda" if has_gpu else "cpu", measured),
        "kernels": rows(request, measured),
    }


def typical_request(device_type: str) -> "KernelRequest":
    import torch

    from longctx_patch.kernels import KernelRequest

    return KernelRequest(device_type, torch.bfloat16, 128)


def rows(request: "KernelRequest", measured: Mapping[str, "Measured"]) -> list[Row]:
    """All kernels, with the rates of those that were measured."""
    from longctx_patch.kernels.select.registry import RECORDS

    figures = _figures(request, measured)
    fastest = min(map(_time, figures.values()), default=None)
    return [_row(record, figures, fastest, measured) for record in RECORDS]


def render(report: Mapping[str, Any]) -> str:
    """The table as text, with what is missing below it."""
    machine = report["machine"] or "No NVIDIA GPU here"
    lines = [f"{machine}.", ""]
    lines += aligned([_TAKES, *(_what_it_takes(row) for row in report["kernels"])])
    lines += ["", "TFLOP/s, forward / backward, where they were measured here:", ""]
    lines += aligned([_SPEED, *(_how_fast(row) for row in report["kernels"])])
    missing = [row for row in report["kernels"] if row["missing"]]
    lines += ["", "Missing here:"] if missing else []
    lines += [f"  {row['name']}: {row['missing']}" for row in missing]
    lines += ["", f"kernel='auto' takes {report['auto']} here for causal masks in bfloat16."]
    return "\n".join(lines)


def _measured(request: "KernelRequest", *, anew: bool) -> Mapping[str, "Measured"]:
    from longctx_patch.kernels import available
    from longctx_patch.kernels.select.preference import machine_cache, measurable, measured_here
    from longctx_patch.kernels.select.probe import measure

    names, cache = measurable(request), machine_cache()
    if anew:
        cache.write(request, measure([available()[name] for name in names], request))
    return measured_here(names, request, cache)


def _auto(device_type: str, measured: Mapping[str, "Measured"]) -> str:
    """The kernel that `auto` takes here for a causal mask: as measured, else in the usual order."""
    from longctx_patch.kernels import available
    from longctx_patch.kernels.select.preference import measured_order
    from longctx_patch.kernels.select.registry import usual_order

    request, kernels = typical_request(device_type), available()
    order = measured_order(usual_order(request), measured)
    return next(name for name in order if kernels[name].refuses(request) is None)


def _figures(request: "KernelRequest", measured: Mapping[str, "Measured"]) -> Figures:
    from longctx_patch.kernels.select.probe import allowed_pairs

    def rates(case: str, seconds: tuple[float, float]) -> Rates:
        products = allowed_pairs(case, request.num_rows) * request.num_heads * request.head_dim * 2
        forward, backward = seconds
        return Rates(2 * products / forward / 1e12, 5 * products / backward / 1e12)

    return {
        name: {case: rates(case, seconds) for case, seconds in one.seconds.items()}
        for name, one in measured.items()
        if one.problem is None
    }


def _row(
    record: "Record", figures: Figures, fastest: float | None, measured: Mapping[str, "Measured"]
) -> Row:
    from longctx_patch.kernels.base import dtype_name

    kernel = record.kernel
    traits, domain = kernel.traits, kernel.domain
    rates = figures.get(kernel.name)
    problem = measured[kernel.name].problem if kernel.name in measured else None
    return {
        "name": kernel.name,
        "version": record.version(),
        "device": domain.device_type or "any",
        "dtypes": [dtype_name(dtype) for dtype in domain.dtypes],
        "head_dims": _head_dims(domain),
        "segments": traits.segments,
        "windows": traits.windows,
        "tables": traits.tiles,
        "softcap": traits.softcap,
        "deterministic": domain.deterministic,
        "missing": _missing(record) or problem,
        "tflops": rates and {case: both._asdict() for case, both in rates.items()},
        "share_of_best": fastest / _time(rates) if rates and fastest else None,
    }


def _missing(record: "Record") -> str | None:
    """Says why a kernel can't be used; without a GPU also which package it needs."""
    kernel, package = record.kernel, record.package
    reason = kernel.refuses(typical_request(kernel.domain.device_type or "cpu"))
    if reason is None or package is None or package.version is not None:
        return reason
    needed = package.problem()
    return reason if needed is None or needed in reason else f"{reason}; {needed}"


def _head_dims(domain: "Domain") -> str:
    if domain.max_head_dim is None:
        return "any"
    if domain.powers_of_2_only:
        return f"powers of 2 to {domain.max_head_dim}"
    step = "" if domain.head_dim_multiple == 1 else f", by {domain.head_dim_multiple}"
    return f"to {domain.max_head_dim}{step}"


def _time(rates: Mapping[str, Rates]) -> float:
    """The time of a causal and a full block, in an arbitrary unit."""
    return sum(_AREA[case] * (2 / both.forward + 5 / both.backward) for case, both in rates.items())


_TAKES = (
    *("KERNEL", "DEVICE", "DTYPES", "HEAD DIMS"),
    *("PACKED", "WINDOWS", "TABLES", "SOFTCAP", "DETERMINISTIC"),
)
_SPEED = ("KERNEL", "VERSION", "CAUSAL", "FULL", "OF BEST")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def _what_it_takes(row: Row) -> tuple[str, ...]:
    has = ("segments", "windows", "tables", "softcap", "deterministic")
    dtypes = " ".join(_SHORT.get(dtype, dtype) for dtype in row["dtypes"])
    answers = ("yes" if row[name] else "no" for name in has)
    return row["name"], row["device"], dtypes, row["head_dims"], *answers


def _how_fast(row: Row) -> tuple[str, ...]:
    rates, share = row["tflops"] or {}, row["share_of_best"]
    cells = (
        f"{rates[case]['forward']:.0f} / {rates[case]['backward']:.0f}" if case in rates else "-"
        for case in _AREA
    )
    return row["name"], row["version"] or "-", *cells, "-" if share is None else f"{share:.0%}"
