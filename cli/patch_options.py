"""Reads what `longctx patch` is asked for."""

# ruff: noqa: RUF009  # option() returns a dataclasses.field, which ruff cannot see
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from longctx_patch.cli.arguments import (
    FILE,
    Choice,
    Gpus,
    RopeOptions,
    Tokens,
    TrainingOptions,
    flag,
    option,
)
from longctx_patch.memory.policies import POLICIES, CheckpointPolicy
from longctx_patch.recipes.data.records import TooLong
from longctx_patch.recipes.data.unwritten import FIELDS


@dataclass(frozen=True, kw_only=True)
class PatchOptions(TrainingOptions, RopeOptions):
    """The options of `longctx patch`, as click reads them; None for options not given."""

    seq_len: int = option("Tokens: 131072, 128K or 1M [of --stages, or --context].", type=Tokens())
    gpus: str = option("In all, over all nodes: 4, or 4xH200.", type=Gpus(), required=True)
    out: Path = option("New run folder.", required=True)
    ulysses: int | None = option("Ulysses degree [by the model's heads, and what its rows hold].")
    ring: int | None = option("Ring degree [the rest].")
    sequence_degree: int | None = option(
        "GPUs per sequence [all, or the fastest number for the rows of a step]."
    )
    nodes: int = option("Machines [1].", default=1)
    checkpoint: CheckpointPolicy = option(
        "What is kept for backward [auto: as much as the GPU's memory takes].",
        type=Choice(list(POLICIES)),
        default="auto",
    )
    attention_kept: float = option(
        "Share of the tokens whose attention layers keep, the last ones [1].",
        type=click.FloatRange(0, 1),
        default=1.0,
    )
    mlp_tiles: int | None = option("Tiles in which MLPs run [as few as the GPU's memory takes].")
    states_on_host: bool = flag(
        "Weights, gradients and optimizer in host memory; the optimizer steps there."
    )
    shifted_group: int | None = option(
        "Train with shifted sparse attention in groups of so many tokens, a quarter of a row say.",
        type=Tokens(),
    )
    allow_weights: Sequence[str] = option(
        "Weights that the checkpoint may lack (then random) or have beyond the model's.",
        default=(),
    )
    tokenizer: str = option("Name or folder if not the model's own; 'bytes'.", default="")
    chat_template: Path | None = option("File of the chat template [the tokenizer's].", type=FILE)
    pack: bool = flag("Rows of documents that don't see each other.")
    data: Sequence[str] = option(
        "What to train on: files, folders, datasets; DATASET:SPLIT.", default=()
    )
    data_shares: Sequence[float] = option(
        "Share of all tokens that a --data has: one for each, in their order [every row once].",
        default=(),
    )
    mixture: str = option(
        "Shares of long and short documents, packed: prolong, olmo3, or long=0.6,short=0.4.",
        default="",
    )
    stages: str = option("Row lengths in stages, each with its steps: 16K:200,64K:100.", default="")
    eval_data: Sequence[str] = option(
        "What to evaluate on, of the same kind: DATASET:test.", default=()
    )
    text_field: str = option("Field of a record that is its text [text].", default="text")
    too_long: TooLong | None = option(
        "Records longer than a row, in conversations and the like [refuse]."
    )
    may_leave_out: Sequence[str] = option(
        "Fields of conversations that the chat template need not write.",
        type=Choice(FIELDS),
        multiple=True,
        default=(),
    )
    allow_dropped: bool = flag("Train though more than 1 % of the records are in no row [refuse].")
    split_special_tokens: bool = flag(
        "Special tokens that records write themselves are read as letters."
    )
    sft: bool = flag("Train with TRL's SFTTrainer [if --data is no text].")
    dpo: bool = flag("Train with TRL's DPOTrainer, on preference data.")
    train_on: Literal["assistant", "all"] | None = option(
        "Tokens of a conversation that are learned [assistant]."
    )
    cpu: bool = flag("Processes on the CPU in place of GPUs, to try it out.")

    @property
    def folder(self) -> Path:
        return self.out.expanduser().resolve()

    @property
    def own_template(self) -> Path:
        """Returns where the run folder keeps the chat template that was given."""
        return self.folder / "chat_template.jinja"

    @property
    def sources(self) -> list[str]:
        return _absolute(self.data)

    @property
    def eval_sources(self) -> list[str]:
        return _absolute(self.eval_data)

    @property
    def sources_by_option(self) -> dict[str, list[str]]:
        return {"--data": self.sources, "--eval-data": self.eval_sources}

    @property
    def num_gpus(self) -> int:
        return int(re.split(r"\D", self.gpus)[0])

    @property
    def step_rows(self) -> int | None:
        """Rows of an optimizer step over all GPUs; None: as many as are trained at once."""
        return self.rows_of(self.seq_len)

    @property
    def names_degrees(self) -> bool:
        return any((self.ulysses, self.ring, self.sequence_degree))

    @property
    def fsdp(self) -> bool:
        """Says whether parameters are sharded: Accelerate does that on GPUs, and not in 4 bits."""
        return not (self.cpu or self.load_in_4bit)

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""
        from longctx_patch.recipes.settings import check_shares

        self.check_weights()
        _ = self.step_rows
        if self.shifted_group and self.dpo:
            raise ValueError(
                f"--shifted-group {self.shifted_group} with --dpo: the reference attends fully, "
                "and would be compared with a model that does not. Leave it out."
            )
        check_shares(self.data_shares, len(self.data))
        if self.states_on_host and not self.fsdp:
            all_there, no_fsdp = "--cpu, where all is on the host", "--load-in-4bit, which has no"
            other = all_there if self.cpu else f"{no_fsdp} FSDP2"
            raise ValueError(f"--states-on-host with {other}: use one of them.")


def _absolute(sources: Sequence[str]) -> list[str]:
    from longctx_patch.recipes.data.addresses import absolute

    return [absolute(source) for source in sources]
