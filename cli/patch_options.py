"""What `longctx patch` is asked for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx_patch.cli.arguments import rows_of_step
from longctx_patch.families.rope_facts import RopeKind
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.recipes.data.addresses import absolute
from longctx_patch.recipes.data.reading import TooLong
from longctx_patch.recipes.settings import check_shares


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """The options of `longctx patch`, as click reads them; None for options not given."""

    out: Path
    seq_len: int
    context: int | None
    gpus: str
    rope: RopeKind | None
    rope_theta: float | None
    rope_factor: float | None
    rope_factors: Path | None
    allow_beyond_reach: bool
    lora: bool
    ulysses: int | None
    ring: int | None
    sequence_degree: int | None
    rows_per_step: int | None
    tokens_per_step: int | None
    nodes: int
    host_gib: float | None
    checkpoint: CheckpointPolicy
    attention_kept: float
    mlp_tiles: int | None
    states_on_host: bool
    dtype: Any
    rank: int | None
    also_train: Sequence[str]
    shifted_group: int | None
    load_in_4bit: bool
    allow_weights: Sequence[str]
    tokenizer: str
    chat_template: Path | None
    pack: bool
    data: Sequence[str]
    eval_data: Sequence[str]
    data_shares: Sequence[float]
    mixture: str
    stages: str
    text_field: str
    allow_dropped: bool
    too_long: TooLong | None
    may_leave_out: Sequence[str]
    split_special_tokens: bool
    sft: bool
    dpo: bool
    train_on: str | None
    cpu: bool

    @property
    def folder(self) -> Path:
        return self.out.expanduser().resolve()

    @property
    def own_template(self) -> Path:
        """Where the run folder keeps the chat template that was given."""
        return self.folder / "chat_template.jinja"

    @property
    def sources(self) -> list[str]:
        return [absolute(source) for source in self.data]

    @property
    def eval_sources(self) -> list[str]:
        return [absolute(source) for source in self.eval_data]

    @property
    def sources_by_option(self) -> dict[str, list[str]]:
        return {"--data": self.sources, "--eval-data": self.eval_sources}

    @property
    def num_gpus(self) -> int:
        return int(re.split(r"\D", self.gpus)[0])

    @property
    def step_rows(self) -> int | None:
        """Rows of an optimizer step over all GPUs; None: as many as are trained at once."""
        return rows_of_step(self.rows_per_step, self.tokens_per_step, self.seq_len)

    @property
    def names_degrees(self) -> bool:
        return any((self.ulysses, self.ring, self.sequence_degree))

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded: Accelerate does that on GPUs, and not in 4 bits."""
        return not (self.cpu or self.load_in_4bit)

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""
        check_weights(lora=self.lora, rank=self.rank, load_in_4bit=self.load_in_4bit)
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


def check_out(out: Path, folder: Path) -> None:
    """Refuse a folder that holds files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {str(out)!r} holds files: a run folder is new or empty, so that nothing is "
            "overwritten. Give another folder, or remove this one."
        )


def check_weights(*, lora: bool, rank: int | None, load_in_4bit: bool) -> None:
    """Refuse options of an adapter where every weight is trained; `longctx plan` does too."""
    if rank is not None and not lora:
        raise ValueError(f"--rank {rank} with --full: a rank is for an adapter. Use --lora.")
    if load_in_4bit and not lora:
        raise ValueError("--load-in-4bit with --full: weights of 4 bits are frozen. Use --lora.")
