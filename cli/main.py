"""`longctx`: the group of commands, and how errors are shown."""

import errno
import os
import signal
import sys
from importlib.util import cache_from_source, find_spec
from itertools import chain
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from typing import Any

import click

from longctx_patch.cli.data import data_command
from longctx_patch.cli.doctor import doctor_command
from longctx_patch.cli.eval import eval_command
from longctx_patch.cli.families import families_command
from longctx_patch.cli.kernels import kernels_command
from longctx_patch.cli.merge_command import merge_command
from longctx_patch.cli.patch import patch_command
from longctx_patch.cli.plan import plan_command
from longctx_patch.cli.report import report_command
from longctx_patch.cli.schedule_command import schedule_command
from longctx_patch.cli.train import train_command
from longctx_patch.cli.verify import verify_command
from longctx_patch.health.last_words import words_of
from longctx_patch.recipes.quiet import quiet_libraries
from longctx_patch.rules.user_cache import user_cache

GROUPS = {
    "Every run": (
        *(patch_command, data_command, train_command, eval_command, report_command),
        merge_command,
    ),
    "Proof and machine": (verify_command, doctor_command, plan_command),
    "To look at": (schedule_command, kernels_command, families_command),
}
"""The commands, in the order of the help."""
COMPILED = {"torch": "_dynamo/symbolic_convert.py", "transformers": "modeling_utils.py"}
"""A file of each package that only training imports, so that whoever built an image did not."""


class ClearErrors(click.Group):
    """Shows what a user can fix (ValueError) as one message, without a traceback; exit code 1."""

    def invoke(self, context: click.Context) -> Any:
        keep_bytecode()
        quiet_libraries()
        try:
            return super().invoke(context)
        except (ValueError, FileExistsError) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE or (words := words_of(error)) is None:
                raise  # click ends quietly where nobody reads the output
            raise click.ClickException(words) from error
        except KeyboardInterrupt:
            click.echo("Interrupted by Ctrl-C.", err=True)
            raise SystemExit(128 + signal.SIGINT) from None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(str(each.name), each.get_short_help_str(80)) for each in commands]
                )


def keep_bytecode() -> None:
    """Keep what Python compiles among the user's caches, from the next import on, where it keeps
    nothing itself: imports of a training take 20 s then, and 6 with it.

    Nothing changes where PYTHONPYCACHEPREFIX is set, and where others can write into the user's
    caches: what is in them would be run.
    """
    if sys.pycache_prefix is not None or not _compiles_each_time():
        return
    folder = user_cache() / "bytecode"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (S_IWGRP | S_IWOTH):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _compiles_each_time() -> bool:
    """Says whether the source of a package was not compiled, and can't be beside it."""
    specs = {file: find_spec(name) for name, file in COMPILED.items()}
    compiled = [
        Path(cache_from_source(str(Path(spec.origin).parent / file)))
        for file, spec in specs.items()
        if spec is not None and spec.origin
    ]
    return any(not each.exists() and not _can_write(each) for each in compiled)


def _can_write(path: Path) -> bool:
    there = next(folder for folder in path.parents if folder.exists())
    return not sys.flags.dont_write_bytecode and os.access(there, os.W_OK)


@click.group(cls=ClearErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longctx-patch")
def main() -> None:
    """Fine-tune Hugging Face models on sequences cut over several GPUs, with exact numbers."""


for each in chain(*GROUPS.values()):
    main.add_command(each)

if __name__ == "__main__":
    main()
