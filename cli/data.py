"""`longctx data`: what a run's model will see, before GPUs are taken."""

import os
import sys
from pathlib import Path

import click

from longctx_patch.recipes.run_record import SETTINGS_FILES, settings_file_of


@click.command("data", short_help="Show the rows that a run folder will train on.")
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.option("--rows", type=click.IntRange(0), default=2, help="Rows to show [2].")
@click.option("--seed", type=int, default=0, help="Which rows: any number [0].")
@click.option(
    "--color/--no-color",
    default=None,
    help="Learned tokens in green, or in {+ +} [colours, if this is a terminal, without NO_COLOR].",
)
def data_command(run: Path, rows: int, seed: int, color: bool | None) -> None:
    """Show the rows that RUN (a run folder, or its settings file) will train on.

    Makes the tables of tokens that the run will find in the cache, so that no GPU waits for them,
    and prints how long rows are, how many tokens are learned, what is cut, how well packing fills
    rows, and some rows, as they are packed, with the tokens that are learned in green, or without
    colours between {+ and +}. The exit code is 1 where the run would be refused.
    """
    from longctx_patch.cli.row_text import braced, green, shown
    from longctx_patch.cli.run_data import data_of_run, render

    file = settings_in(run)
    found = data_of_run(file)
    click.echo(render(found, file))
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for text in shown(found.rows, found.decode, rows, seed, green if color else braced):
        click.echo(text, color=color)
    if found.refused:
        raise click.exceptions.Exit(1)


def settings_in(run: Path) -> Path:
    """The settings file of a run. Raises ValueError for a folder without one."""
    if run.is_file():
        return run
    if (found := settings_file_of(run)) is not None:
        return found
    raise ValueError(
        f"{run} has no {' or '.join(SETTINGS_FILES)}: give a run folder that `longctx patch` has "
        "written, or a settings file."
    )
