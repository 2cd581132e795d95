"""`longctx families`: which model families can be patched, and the reason for each that can't."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from longctx_patch.cli.text_table import aligned
from longctx_patch.hf.model.family import IMAGES
from longctx_patch.rules.names import did_you_mean

if TYPE_CHECKING:
    from longctx_patch.hf.model.family import Family

INSTEAD = (
    "What to do: train it without sequence parallelism, or take a model of a family that is\n"
    "supported (`longctx families` lists them)."
)


@click.command("families", short_help="Tell which models can be patched, and why others can't.")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout.")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/reference/families.md.")
def families_command(model: str | None, as_json: bool, markdown: bool) -> None:
    """Tell whether MODEL can be patched, or list all model families.

    MODEL is a hub name, a folder, a config.json or a model_type. Exit code 1: it can't. The errors
    are those of a tiny model of each family on two ranks against its stock self, the worst of loss
    and gradients. A family that is not listed is refused: nobody has compared it with one process.
    """
    from longctx_patch.hf.model.supported import TABLE
    from longctx_patch.hf.model.survey import survey

    if model is not None:
        if as_json or markdown:
            raise click.UsageError("--json and --markdown print all families: leave out MODEL.")
        can, answer = answer_for(model)
        click.echo(answer)
        raise click.exceptions.Exit(0 if can else 1)
    if as_json and markdown:
        raise click.UsageError("--json with --markdown: choose one of them.")
    if as_json:
        rows = [asdict(f) | {"survey": survey().get(f.model_type)} for f in TABLE]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(render_markdown(TABLE) if markdown else render(TABLE))


def answer_for(model: str) -> tuple[bool, str]:
    """(whether `model` can be patched, why or why not and what to do)."""
    from longctx_patch.hf.model.supported import TABLE

    names = {name.strip().lower(): f for f in TABLE for name in f.name.split(",")}
    types = {f.model_type: f for f in TABLE}
    family = types.get(model) or names.get(model.lower())
    exists = Path(model).expanduser().exists()
    if family is None and not exists and "/" not in model and (near := did_you_mean(model, types)):
        return False, f"no: {model!r} is no model_type in the table.{near}"
    if family is None or exists:
        return _answer_by_config(model)
    if family.refusal is not None:
        return False, f"no: {family.model_type} ({family.name}): {family.refusal}.\n{INSTEAD}"
    return True, _yes(family, model="MODEL")


def _answer_by_config(model: str) -> tuple[bool, str]:
    """Like `answer_for`, by the config of a hub name or of files."""
    from longctx_patch.config import LongContextConfig
    from longctx_patch.hf.model.checks import FAMILIES, UnsupportedModelError, check_model_config
    from longctx_patch.hf.model.load import load_model_config
    from longctx_patch.hf.model.rope_facts import reachable_length
    from longctx_patch.recipes.models import weights_or_config

    try:
        config = load_model_config(model)
        check_model_config(config, LongContextConfig())
    except UnsupportedModelError as error:
        return False, f"no: {error}"
    return True, _yes(
        FAMILIES[config.model_type], weights_or_config(model), reachable_length(config)
    )


def _yes(family: "Family", model: str, reach: int | None = None) -> str:
    features = f", with {', '.join(family.features)}" if family.features else ""
    lines = [f"yes: {family.model_type} ({family.name}){features}"]
    float64, float32 = errors_of(family)
    if float64 != "-":
        lines.append(
            f"A tiny one on two ranks differs from its stock self by {float64} in float64 and "
            f"{float32} in float32."
        )
    if IMAGES in family.features:
        lines.append("`longctx patch` trains its text model; docs/how-to/images.md has images too.")
    seq_len = "32K" if reach is None or reach >= 2**15 else f"{reach}"
    patch = f"longctx patch {shlex.quote(model)} --seq-len {seq_len} --gpus 4"
    return "\n".join([*lines, f"Next: {patch} --data DATA --out run/"])


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
    """Yes and with what, or no and why."""
    if family.refusal is not None:
        return f"no: {family.refusal}"
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
