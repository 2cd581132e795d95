"""`longctx families`: which model families can be patched, and the reason for each that can't."""

import json
import shlex
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from longctx_patch.config import LongContextConfig
from longctx_patch.families.checks import UnsupportedModelError, check_model_config
from longctx_patch.families.family import IMAGES, Family
from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.rope_facts import reachable_length
from longctx_patch.families.supported import FAMILIES, NOT_PROVEN, REFUSED, TABLE
from longctx_patch.rules.names import did_you_mean
from longctx_patch.rules.text_table import aligned

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

    MODEL is a hub name, a folder, a config.json or a model_type. Exit code 1: it can't. A family
    that is not listed is refused: nobody has compared it with one process.
    """
    if model is not None:
        if as_json or markdown:
            raise click.UsageError("--json and --markdown print all families: leave out MODEL.")
        can, answer = answer_for(model)
        click.echo(answer)
        raise click.exceptions.Exit(0 if can else 1)
    if as_json and markdown:
        raise click.UsageError("--json with --markdown: choose one of them.")
    if as_json:
        rows = [asdict(f) | {"refusal": None} for f in TABLE]
        refused = [{"model_type": name, "refusal": reason} for name, reason in REFUSED.items()]
        click.echo(json.dumps([*rows, *refused], indent=2))
    else:
        click.echo(render_markdown() if markdown else render())


def answer_for(model: str) -> tuple[bool, str]:
    """(whether `model` can be patched, why or why not and what to do)."""
    names = {name.strip().lower(): f for f in TABLE for name in f.name.split(",")}
    family = FAMILIES.get(model) or names.get(model.lower())
    if Path(model).expanduser().exists() or (family is None and "/" in model):
        return _answer_by_config(model)
    if family is not None:
        return True, _yes(family, model="MODEL")
    if model in REFUSED:
        return False, f"no: {model}: {REFUSED[model]}.\n{INSTEAD}"
    near = did_you_mean(model, FAMILIES)
    return False, f"no: {model!r} is no path, and no model_type in the table.{near}\n{INSTEAD}"


def _answer_by_config(model: str) -> tuple[bool, str]:
    """Like `answer_for`, by the config of a hub name or of files."""
    from longctx_patch.recipes.models import base_of_adapter, check_not_fp8

    try:
        config = load_model_config(model)
        check_model_config(config, LongContextConfig())
    except UnsupportedModelError as error:
        return False, f"no: {error}"
    check_not_fp8(model, config)
    family, (first, base) = FAMILIES[config.model_type], base_of_adapter(model)
    return True, _yes(family, base, reachable_length(config), first)


def _yes(family: Family, model: str, reach: int | None = None, first: str = "") -> str:
    features = f", with {', '.join(family.features)}" if family.features else ""
    lines = [f"yes: {family.model_type} ({family.name}){features}"]
    if IMAGES in family.features:
        lines.append("`longctx patch` trains its text model; docs/how-to/images.md has images too.")
    seq_len = "32K" if reach is None or reach >= 2**15 else f"{reach}"
    patch = f"{first}longctx patch {shlex.quote(model)} --seq-len {seq_len} --gpus 4"
    return "\n".join([*lines, f"Next: {patch} --data DATA --out run/"])


def render() -> str:
    """One line a family; reasons are not cut."""
    rows = [("MODEL TYPE", "NAME", "SUPPORT")]
    rows += [(f.model_type, f.name, ", ".join(("yes", *f.features))) for f in TABLE]
    rows += [(model_type, "", f"no: {reason}") for model_type, reason in REFUSED.items()]
    return "\n".join(aligned(rows))


def render_markdown() -> str:
    """Two tables: what is supported, and what is refused and why, by reason."""
    lines = ["| `model_type` | models | beside causal attention |", "|---|---|---|"]
    lines += [f"| `{f.model_type}` | {f.name} | {', '.join(f.features)} |" for f in TABLE]
    lines += ["", "| refused | why |", "|---|---|"]
    for reason, alike in groupby(REFUSED, key=REFUSED.__getitem__):
        lines.append(f"| {', '.join(f'`{model_type}`' for model_type in alike)} | {reason} |")
    return "\n".join([*lines, f"| any other | {NOT_PROVEN} |"])
