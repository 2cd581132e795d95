"""On a GPU a step is checked without a wait of the host, and what was bad is known a step later."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from longctx_patch import (
    BadStepError,
    FiniteSteps,
    LongContextConfig,
    LongContextTrainer,
    check_weights,
)
from tests.health.flaw import Flaw
from tests.hf.tiny import tiny_model, token_rows
from tests.trainer.unguarded import LeavesOut, Unguarded

pytestmark = pytest.mark.gpu

STEPS, BAD = 7, 4


def trainer_of(cls: Any, folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=50,
        report_to="none",
        optim="adamw_torch_fused",
        **given.pop("args", {"save_strategy": "no"}),
    )
    rows = [{**row, "labels": row["input_ids"]} for row in token_rows(61, 2 * STEPS)]
    options = {"long_context": LongContextConfig()} | given
    return cls(model=tiny_model(), args=args, train_dataset=rows, **options)


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_nothing_waits_until_the_numbers_are_asked_for() -> None:
    """A fused AdamW under torch's own alarm; the first step, whose numbers are bad, leaves it as it
    was made."""
    module = torch.nn.Linear(64, 64, device="cuda")
    before = module.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    steps = FiniteSteps(optimizer, skip_bad_steps=1)
    for factor in (math.nan, 1.0):
        loss = module(torch.randn(8, 64, device="cuda")).square().mean() * factor
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = steps.guard(loss, norm)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not pending.is_on_host
        numbers = steps.settle(pending)
        assert numbers.is_applied == math.isfinite(factor)
        assert torch.equal(module.weight, before) != numbers.is_applied
    assert optimizer.state[module.weight]["step"].item() == 1


def waits_of(trainer: Any) -> int:
    """How often torch says that the host waits for the GPU in a training run."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)


def test_a_trainer_waits_no_more_often_and_has_the_same_bits(tmp_path: Path) -> None:
    guarded = trainer_of(LongContextTrainer, tmp_path / "a")
    plain = trainer_of(Unguarded, tmp_path / "b")
    # Weights are looked at once, before the first step; no step adds a wait.
    assert waits_of(guarded) - waits_of(plain) < STEPS
    assert all(map(torch.equal, weights(guarded), weights(plain)))


def test_a_bad_step_is_left_out_and_never_saved(tmp_path: Path) -> None:
    skips = trainer_of(LongContextTrainer, tmp_path / "a", skip_bad_steps=1)
    Flaw(skips.model, "loss", {BAD})
    skips.train()
    plain = trainer_of(Unguarded, tmp_path / "b", callbacks=[LeavesOut(BAD)])
    plain.train()
    assert all(map(torch.equal, weights(skips), weights(plain)))
    assert [e["skipped_step"] for e in skips.state.log_history if "skipped_step" in e] == [BAD]

    saves = {"save_strategy": "steps", "save_steps": 1}
    for name, args, last in (("c", saves, BAD), ("d", {"save_strategy": "no"}, BAD + 1)):
        ends = trainer_of(LongContextTrainer, tmp_path / name, args=args)
        Flaw(ends.model, "model.layers.1.mlp", {BAD})
        with pytest.raises(BadStepError, match=r"^step 4: .*model\.layers\.1\.mlp "):
            ends.train()
        assert ends.state.global_step in (last, last - 1)
    saved = sorted(path.name for path in (tmp_path / "c").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_weight_is_found_on_the_gpu_and_on_the_host() -> None:
    for device in ("cuda", "cpu"):
        module = torch.nn.Linear(64, 64, device=device)
        check_weights(module, torch.device("cuda"))
        module.weight.data[3, 3] = math.inf
        with pytest.raises(ValueError, match="weight has 1 values that are not finite"):
            check_weights(module, torch.device("cuda"))
