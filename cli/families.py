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

    A family that is not listed is refused: nobody has compared it with one process.
    """
    from longctx_patch.hf.model.supported import TABLE

    if as_json and markdown:
        raise click.UsageError("--json with --markdown: choose one of them.")
    if as_json:
        click.echo(json.dumps([asdict(family) for family in TABLE], indent=2))
    else:
        click.echo(render_markdown(TABLE) if markdown else render(TABLE))


def render(table: Iterable["Family"]) -> str:
    """One line a family; reasons are not cut."""
    rows = [("MODEL TYPE", "NAME", "SUPPORT")]
    rows += [(family.model_type, family.name, support_of(family)) for family in table]
    return "\n".join(aligned(rows))


def support_of(family: "Family") -> str:
    """Yes and with what, or no and why."""
    if family.refusal is not None:
        return f"no: {family.refusal}"
    return ", ".join(("yes", *family.features))


def render_markdown(table: Iterable["Family"]) -> str:
    """Two tables: what is supported, and what is refused, families of one reason together."""
    families = list(table)
    lines = ["| `model_type` | models | beside causal attention |", "|---|---|---|"]
    lines += [
        f"| `{family.model_type}` | {family.name} | {', '.join(family.features)} |"
        for family in families
        if family.refusal is None
    ]
    lines += ["", "| refused | why |", "|---|---|"]
    refused = (family for family in families if family.refusal is not None)
    for reason, alike in groupby(refused, key=lambda family: family.refusal):
        lines.append(f"| {', '.join(f'`{family.model_type}`' for family in alike)} | {reason} |")
    return "\n".join(lines)
