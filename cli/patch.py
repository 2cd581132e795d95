"""`longctx patch`: check a model and degrees, then write a folder that is ready to train."""

from pathlib import Path
from typing import Any

import click

from longctx_patch.cli.arguments import Choice, Gpus, Tokens
from longctx_patch.families.rope_facts import SCALINGS
from longctx_patch.memory.policies import POLICIES
from longctx_patch.recipes.data.unwritten import FIELDS
from longctx_patch.recipes.lengths import read_stages

TOO_LONG = ("refuse", "cut", "split")


class OneModel(click.Command):
    """Says what a shell does to a glob that is not quoted: its other files are arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_globs = {"--data", "--eval-data"} & {arg.partition("=")[0] for arg in args}
        try:
            return super().parse_args(ctx, args)
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
@click.option("--seq-len", type=Tokens(), help="Tokens: 131072, 128K or 1M [longest of --stages].")
@click.option("--gpus", type=Gpus(), required=True, help="In all, over all nodes: 4, or 4xH200.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New run folder.")
@click.option(
    "--context", type=Tokens(), help="Tokens that the trained model is to reach [seq-len]."
)
@click.option("--rope", type=Choice(SCALINGS), help="RoPE scaling that reaches the context.")
@click.option("--rope-theta", type=float, help="The base of --rope theta [by its rule].")
@click.option("--rope-factor", type=float, help="Its factor [the ratio of the lengths].")
@click.option(
    "--rope-factors",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON list of the factors of --rope longrope [the model's].",
)
@click.option(
    "--allow-beyond-reach",
    is_flag=True,
    help="Train on rows that its unchanged RoPE doesn't reach.",
)
@click.option("--lora/--full", default=True, help="Train an adapter or every weight [lora].")
@click.option(
    "--ulysses",
    type=click.IntRange(1),
    help="Ulysses degree [by the model's heads, and what its rows hold].",
)
@click.option("--ring", type=click.IntRange(1), help="Ring degree [the rest].")
@click.option(
    "--sequence-degree",
    type=click.IntRange(1),
    help="GPUs per sequence [all, or the fastest number for the rows of a step].",
)
@click.option(
    "--rows-per-step", type=click.IntRange(1), help="Rows of an optimizer step [those at once]."
)
@click.option("--tokens-per-step", type=Tokens(), help="The same in tokens: 1M.")
@click.option("--nodes", type=click.IntRange(1), default=1, help="Machines [1].")
@click.option("--host-gib", type=float, help="Memory of a machine's host [not checked].")
@click.option(
    "--checkpoint",
    type=Choice(list(POLICIES)),
    default="auto",
    help="What is kept for backward [auto: as much as the GPU's memory takes].",
)
@click.option(
    "--attention-kept",
    type=click.FloatRange(0, 1),
    default=1.0,
    help="Share of the tokens whose attention layers keep, the last ones [1].",
)
@click.option(
    "--mlp-tiles",
    type=click.IntRange(1),
    help="Tiles in which MLPs run [as few as the GPU's memory takes].",
)
@click.option(
    "--states-on-host",
    is_flag=True,
    help="Weights, gradients and optimizer in host memory; the optimizer steps there.",
)
@click.option(
    "--dtype",
    type=Choice(("float32", "bfloat16")),
    help="Dtype that weights load in [adapter: that of the model's config; --full: float32].",
)
@click.option("--rank", type=click.IntRange(1), help="Rank of the adapter [16].")
@click.option(
    "--also-train",
    multiple=True,
    help="As a whole beside the adapter: embeddings,norms, or one of them.",
)
@click.option(
    "--shifted-group",
    type=Tokens(),
    help="Train with shifted sparse attention in groups of so many tokens, a quarter of a row say.",
)
@click.option("--load-in-4bit", is_flag=True, help="The adapter's frozen weights in 4 bits.")
@click.option(
    "--allow-weights",
    multiple=True,
    help="Weights that the checkpoint may lack (then random) or have beyond the model's.",
)
@click.option("--tokenizer", default="", help="Name or folder if not the model's own; 'bytes'.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of the chat template [the tokenizer's].",
)
@click.option("--pack", is_flag=True, help="Rows of documents that don't see each other.")
@click.option(
    "--data", multiple=True, help="What to train on: files, folders, datasets; DATASET:SPLIT."
)
@click.option(
    "--data-shares",
    multiple=True,
    type=float,
    help="Share of all tokens that a --data has: one for each, in their order [every row once].",
)
@click.option(
    "--mixture",
    default="",
    help="Shares of long and short documents, packed: prolong, olmo3, or long=0.6,short=0.4.",
)
@click.option(
    "--stages",
    default="",
    help="Row lengths in stages, each with its steps: 16K:200,64K:100.",
)
@click.option(
    "--eval-data", multiple=True, help="What to evaluate on, of the same kind: DATASET:test."
)
@click.option("--text-field", default="text", help="Field of a record that is its text [text].")
@click.option(
    "--too-long",
    type=Choice(TOO_LONG),
    help="Records longer than a row, in conversations and the like [refuse].",
)
@click.option(
    "--may-leave-out",
    type=Choice(FIELDS),
    multiple=True,
    help="Fields of conversations that the chat template need not write.",
)
@click.option(
    "--allow-dropped",
    is_flag=True,
    help="Train though more than 1 % of the records are in no row [refuse].",
)
@click.option(
    "--split-special-tokens",
    is_flag=True,
    help="Special tokens that records write themselves are read as letters.",
)
@click.option("--sft", is_flag=True, help="Train with TRL's SFTTrainer [if --data is no text].")
@click.option("--dpo", is_flag=True, help="Train with TRL's DPOTrainer, on preference data.")
@click.option(
    "--train-on",
    type=Choice(("assistant", "all")),
    help="Tokens of a conversation that are learned [assistant].",
)
@click.option("--cpu", is_flag=True, help="Processes on the CPU in place of GPUs, to try it out.")
def patch_command(model: str, seq_len: int | None, stages: str, **options: Any) -> None:
    """Write a run folder that fine-tunes MODEL (a hub name, a folder or a config.json).

    Everything is checked first: model family, degrees, heads, length, text, and where --gpus names
    a kind, that the run is predicted to fit its memory. The folder holds
    config.json with the RoPE change, accelerate.yaml, the settings of the recipe (finetune.yaml for
    text, sft.yaml for conversations and the like, dpo.yaml for preferences) and a README.md that
    says what was decided and how to start. Weights are not loaded here.
    """
    from longctx_patch.cli import run_folder
    from longctx_patch.cli.decisions import PatchOptions, decide

    if not (seq_len or stages):
        raise click.UsageError(
            "Missing option '--seq-len', unless --stages says how long rows are."
        )
    seq_len = seq_len or max(each.seq_len for each in read_stages(stages))
    decisions = decide(model, PatchOptions(seq_len=seq_len, stages=stages, **options))
    run_folder.write(decisions)
    click.echo(run_folder.render(decisions))
