"""`longctx`: the group of commands, and how errors are shown."""

import errno
import signal
from itertools import chain
from typing import Any

import click

from longctx_patch.cli.data import data_command
from longctx_patch.cli.doctor import doctor_command
from longctx_patch.cli.eval import eval_command
from longctx_patch.cli.families import families_command
from longctx_patch.cli.kept_bytecode import keep_bytecode
from longctx_patch.cli.kernels import kernels_command
from longctx_patch.cli.merge import merge_command
from longctx_patch.cli.patch import patch_command
from longctx_patch.cli.plan import plan_command
from longctx_patch.cli.report import report_command
from longctx_patch.cli.schedule import schedule_command
from longctx_patch.cli.train import train_command
from longctx_patch.cli.verify import verify_command
from longctx_patch.health.last_words import words_of
from longctx_patch.recipes.quiet import quiet_libraries

GROUPS = {
    "Every run": (
        *(patch_command, data_command, train_command, eval_command, report_command),
        merge_command,
    ),
    "Proof and machine": (verify_command, doctor_command, plan_command),
    "To look at": (schedule_command, kernels_command, families_command),
}
"""The commands, in the order of the help."""


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


@click.group(cls=ClearErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longctx-patch")
def main() -> None:
    """Fine-tune Hugging Face models on sequences cut over several GPUs, with exact numbers."""


for each in chain(*GROUPS.values()):
    main.add_command(each)

if __name__ == "__main__":
    main()
