"""`longctx patch`: check a model and degrees, then write a folder that is ready to train."""

from typing import Any

import click

from longctx_patch.cli.arguments import options_of
from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.recipes.lengths import read_stages


class OneModel(click.Command):
    """Says what a shell does to a glob that is not quoted (its other files are arguments), and what
    --gpus takes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_globs = {"--data", "--eval-data"} & {arg.partition("=")[0] for arg in args}
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is not None and error.param.name == "gpus":
                words = "Missing option '--gpus': 4xH200, say, or --gpus 2 --cpu for the CPU"
                raise click.UsageError(words, ctx) from error
            raise
        except click.UsageError as error:
            if not takes_globs or "extra argument" not in error.message:
                raise
            raise click.UsageError(
                f"{error.message}. One source follows each --data or --eval-data: quote a glob, "
                "--data 'texts/*.jsonl', or repeat the option",
                ctx,
            ) from error


@click.command("patch", cls=OneModel, short_help="Write a run folder that fine-tunes a model.")
@click.argument("model")
@options_of(PatchOptions)
def patch_command(
    model: str, seq_len: int | None, stages: str, context: int | None, **options: Any
) -> None:
    """Write a run folder that fine-tunes MODEL (a hub name, a folder or a config.json).

    Everything is checked first: model family, degrees, heads, length, text, and where --gpus names
    a kind, that the run is predicted to fit its memory. The folder holds
    config.json with the RoPE change, accelerate.yaml, the settings of the recipe (finetune.yaml for
    text, sft.yaml for conversations and the like, dpo.yaml for preferences) and a README.md that
    says what was decided and how to start. Weights are not loaded here.
    """
    import torch

    from longctx_patch.cli import run_folder
    from longctx_patch.cli.decisions import decide

    lengths = [each.seq_len for each in read_stages(stages)] if stages else [context or 0]
    if not (seq_len := seq_len or max(lengths)):
        raise click.UsageError(
            "Missing option '--seq-len', unless --context or --stages says how long rows are."
        )
    decisions = decide(
        model, PatchOptions(seq_len=seq_len, stages=stages, context=context, **options)
    )
    run_folder.write(decisions)
    click.echo(run_folder.render(decisions))
    if not decisions.options.cpu and not torch.cuda.is_available():
        click.echo("No GPU is here: start it where they are, or patch with --cpu to try it here.")
