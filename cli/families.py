"""`longctx families`: which model families can be patched, and the reason for each that can't."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import click

from longctx_patch.cli.text_table import aligned

if TYPE_CHECKING:
    from longctx_patch.hf.model.family import Family


@click.command("families")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout.")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/reference/families.md.")
def families_command(as_json: bool, markdown: bool) -> None:
    """List the model families that can be patched, and why others can't.

    The errors are those of a tiny model of each family on two ranks against its stock self, the
    worst of loss and gradients. A family that is not listed is refused: nobody has compared it with
    one process.
    """
    from longctx_patch.hf.model.supported import TABLE
    from longctx_patch.hf.model.survey import survey

    if as_json and markdown:
        raise click.UsageError("--json with --markdown: choose one of them.")
    if as_json:
        rows = [asdict(f) | {"survey": survey().get(f.model_type)} for f in TABLE]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(render_markdown(TABLE) if markdown else render(TABLE))


def render(table: Iterable["Family"]) -> str:
    """One line a family; reasons are not cut."""
    rows = [("MODEL TYPE", "NAME", "FLOAT64", "FLOAT32", "SUPPORT")]
    rows += [(f.model_type, f.name, *errors_of(f), support_of(f)) for f in table]
    return "\n".join(aligned(rows))


def errors_of(family: "Family") -> tuple[str, str]:
    """The errors of a run in float64 and in float32; dashes where it differs, fails or was not."""
    from longctx_patch.hf.model.survey import errors

    found = errors(family.model_type)
    return ("-", "-") if found is None else (f"{found[0]:.0e}", f"{found[1]:.0e}")


def support_of(family: "Family") -> str:
    """Yes and with what, or no and why, and what running it gave."""
    from longctx_patch.hf.model.survey import found

    if family.refusal is not None:
        return f"no: {family.refusal} [run: {found(family.model_type)}]"
    return ", ".join(("yes", *family.features))


def render_markdown(table: Iterable["Family"]) -> str:
    """Three tables: what is supported, what is refused and why, by reason, and what running each
    refused family gave."""
    from longctx_patch.hf.model.survey import found, surveyed_version

    families = list(table)
    lines = [
        "| `model_type` | models | float64 | float32 | beside causal attention |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{f.model_type}` | {f.name} | {' | '.join(errors_of(f))} | {', '.join(f.features)} |"
        for f in families
        if f.refusal is None
    ]
    lines += ["", "| refused | why |", "|---|---|"]
    refused = [family for family in families if family.refusal is not None]
    for reason, alike in groupby(refused, key=lambda family: family.refusal):
        lines.append(f"| {', '.join(f'`{family.model_type}`' for family in alike)} | {reason} |")
    lines += ["", f"| refused | run past its refusal, transformers {surveyed_version()} |"]
    lines += ["|---|---|"]
    cells = ((f.model_type, found(f.model_type).replace("|", "\\|")) for f in refused)
    lines += [f"| `{model_type}` | {text} |" for model_type, text in cells]
    return "\n".join(lines)
