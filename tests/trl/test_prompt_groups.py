"""Rows of one prompt side by side, whatever order TRL's shuffle leaves them in."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from trl import GRPOTrainer, RLOOTrainer, SFTTrainer

from longctx_patch import LongContextConfig
from longctx_patch.trainer.prompt_groups import MicroBatch, grouping_problems, regrouped
from tests.trl.cases import Case, make_trainer, rows
from tests.trl.test_trainers import GROUPED

ALIKE = LongContextConfig()
PROMPTS = ([5, 6, 7], [5, 6], [9])


def generation(num_batches: int, size: int) -> list[MicroBatch]:
    """Micro-batches as TRL keeps them: shuffled rows of three prompts, padded on the left."""
    order = torch.randperm(num_batches * size, generator=torch.Generator().manual_seed(0))
    found: list[MicroBatch] = []
    for chosen in order.split(size):
        prompts = [PROMPTS[row % 3] for row in chosen.tolist()]
        padded = [[0] * (3 - len(ids)) + ids for ids in prompts]
        found.append(
            {
                "prompt_ids": torch.tensor(padded),
                "prompt_mask": torch.tensor(
                    [[int(n >= 3 - len(p)) for n in range(3)] for p in prompts]
                ),
                "advantages": chosen.double(),
                "num_images": chosen.tolist(),
                "num_items_in_batch": torch.tensor(17),
                "pixel_values": None,
            }
        )
    return found


def rows_of(batches: Sequence[MicroBatch]) -> list[int]:
    return [int(row) for batch in batches for row in batch["advantages"]]


def test_each_step_keeps_its_rows_and_prompts_meet() -> None:
    before = generation(num_batches=6, size=3)
    after = regrouped(before, per_step=3)
    for step in (slice(0, 3), slice(3, 6)):
        assert sorted(rows_of(after[step])) == sorted(rows_of(before[step]))
        prompts = [row % 3 for row in rows_of(after[step])]
        assert sum(a != b for a, b in pairwise(prompts)) == 2
    for batch in after:
        assert len(batch["prompt_ids"]) == 3
        for name, value in values(batch).items():
            assert value == [of_row(name, row) for row in rows_of([batch])]
        assert batch["num_items_in_batch"] == 17
        assert batch["pixel_values"] is None


def values(batch: MicroBatch) -> dict[str, list[Any]]:
    return {
        "num_images": batch["num_images"],
        "prompt_ids": [row[row > 0].tolist() for row in batch["prompt_ids"]],
        "prompt_mask": batch["prompt_mask"].sum(1).tolist(),
    }


def of_row(name: str, row: int) -> Any:
    prompt = PROMPTS[row % 3]
    return {"num_images": row, "prompt_ids": prompt, "prompt_mask": len(prompt)}[name]


def test_rows_with_images_are_refused() -> None:
    batch = {**generation(1, 3)[0], "pixel_values": torch.zeros(12, 4)}
    with pytest.raises(ValueError, match="pixel_values of 12 values for 3 rows"):
        regrouped([batch], per_step=1)


def trainer(cls: Any = GRPOTrainer, **more: Any) -> Any:
    made = cls.__new__(cls)
    steps = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
    of_args = (*steps, "neftune_noise_alpha")
    args = SimpleNamespace(**steps | {name: more.pop(name) for name in of_args if name in more})
    vars(made).update({"args": args, "loss_type": "dapo", "model": nn.Linear(1, 1)} | more)
    return made


@pytest.mark.parametrize(
    ("given", "config", "said"),
    [
        (trainer(SFTTrainer), ALIKE, "with SFTTrainer"),
        (trainer(), LongContextConfig(share_prefixes="off"), "share_prefixes='off'"),
        (trainer(steps_per_generation=3), ALIKE, "rows of two generations"),
        (trainer(loss_type="bnpo"), ALIKE, "loss_type='bnpo'"),
        (trainer(loss_type="new"), ALIKE, "loss_type='new'"),
        (trainer(top_entropy_quantile=0.5), ALIKE, "top_entropy_quantile=0.5"),
        (trainer(_entropy_bonus_enabled=True), ALIKE, "entropy bonus"),
        (trainer(RLOOTrainer, aux_loss_enabled=True), ALIKE, "a router's loss"),
        (trainer(model=nn.Sequential(nn.Dropout(0.1))), ALIKE, "dropout of 0.1 in 0"),
        (trainer(neftune_noise_alpha=5), ALIKE, "neftune_noise_alpha=5"),
    ],
)
def test_losses_that_ask_who_shares_a_micro_batch_are_refused(
    given: Any, config: LongContextConfig, said: str
) -> None:
    assert said in " ".join(grouping_problems(given, config))


@pytest.mark.parametrize("cls", [GRPOTrainer, RLOOTrainer])
def test_sums_over_rows_are_grouped(cls: type) -> None:
    assert not [*grouping_problems(trainer(cls, steps_per_generation=1), ALIKE)]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_micro_batches_of_a_trainer_have_one_prompt_each(tmp_path: Path) -> None:
    once = GROUPED | {"max_steps": 1}
    config = {"share_prefixes": "auto"}
    case = Case("grpo", "grpo", "prompts", config, adapter=True, arguments=once)
    found = {}
    for together in (False, True):
        given = {"train_dataset": Dataset.from_list(rows("prompts", 3, 1))}
        named = replace(case, mixin={"group_by_prompt": together})
        trained = make_trainer(named, tmp_path, is_patched=True, **given)
        trained.train()
        batches = trained._buffered_inputs
        if together:
            trained._step += 1  # as where an interrupt ends a step after its first micro-batch
            with pytest.raises(ValueError, match="stopped after 1 of 3 micro-batches"):
                trained.train()
        found[together] = [len(batch["prompt_ids"].unique(dim=0)) for batch in batches]
        trained.unpatch()
    assert found[True] == [1, 1, 1]
    assert max(found[False]) > 1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:SFTConfig has max_length")
def test_the_trainer_refuses_when_it_is_made(tmp_path: Path) -> None:
    case = Case("sft", "sft", "text", {}, mixin={"group_by_prompt": True})
    table = Dataset.from_list(rows("text", 2, 1))
    with pytest.raises(ValueError, match="only GRPOTrainer and RLOOTrainer"):
        make_trainer(case, tmp_path, is_patched=True, train_dataset=table)
