"""`longctx`: the group of commands, and how errors are shown."""

from typing import Any

import click

from longctx_patch.cli.data import data_command
from longctx_patch.cli.doctor import doctor_command
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
from longctx_patch.recipes.quiet import quiet_libraries


class ClearErrors(click.Group):
    """Shows what a user can fix (ValueError) as one message, without a traceback; exit code 1."""

    def invoke(self, context: click.Context) -> Any:
        keep_bytecode()
        quiet_libraries()
        try:
            return super().invoke(context)
        except (ValueError, FileExistsError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=ClearErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longctx-patch")
def main() -> None:
    """Fine-tune Hugging Face models on sequences cut over several GPUs, with exact numbers."""


main.add_command(data_command)
main.add_command(doctor_command)
main.add_command(families_command)
main.add_command(kernels_command)
main.add_command(merge_command)
main.add_command(patch_command)
main.add_command(plan_command)
main.add_command(report_command)
main.add_command(schedule_command)
main.add_command(train_command)
main.add_command(verify_command)

if __name__ == "__main__":
    main()
