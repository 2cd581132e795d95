"""Trainers log rarely and would train on: each step is checked, and nothing bad is applied or
saved, whether the host reads at once or, as on a GPU, a step later."""

import math
import re
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.health.finite import BadStepError, PendingStep
from tests.health.flaw import Flaw
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.trainer.trained import Case, make_trainer, model_of, sharded, weights_of
from tests.trainer.unguarded import LeavesOut, Unguarded
from tests.trl import cases as trl

STEPS, BAD = 6, 4
USUAL: dict[str, Any] = {"max_steps": STEPS, "warmup_steps": 0, "gradient_accumulation_steps": 2}
USUAL |= {"learning_rate": 0.01, "logging_steps": 50, "weight_decay": 0.1}
RING = {"ring_degree": 2}
CASE = Case("fused", arguments=USUAL | {"optim": "adamw_torch_fused"})
SAVES = {"save_strategy": "steps", "save_steps": 1}
SHARDED = replace(CASE, config=RING, sharding=sharded(RING, "LlamaDecoderLayer", 1))
LAYER = "model.layers.1.mlp.down_proj"


@dataclass(frozen=True)
class Trial:
    """A run with a flaw in the batches of step `BAD`."""

    case: Case | trl.Case
    place: str = ""
    """None where empty."""
    rank: int = 0
    """On which the flaw is."""
    skips: int = 0
    late: bool = False
    """Whether the host reads a step's numbers a step later."""
    trl: bool = False


class Found(NamedTuple):
    weights: dict[str, Tensor]
    error: str
    logged: list[dict[str, Any]]
    saved: list[str]


def run(folder: str, trial: Trial) -> Found:
    case: Any = trial.case
    with ExitStack() as stack:
        if case.sharding:
            stack.enter_context(sharding_on_cpus())
        if trial.late:
            never = PropertyMock(return_value=False)
            stack.enter_context(patch.object(PendingStep, "is_on_host", never, create=True))
        if trial.trl:
            trainer = trl.make_trainer(case, Path(folder) / case.name, is_patched=True)
            trainer._skip_bad_steps = trial.skips
        else:
            options = {"model": model_of(case), "skip_bad_steps": trial.skips}
            trainer = make_trainer(case, Path(folder) / case.name, is_patched=True, **options)
        model = trainer.long_context_handle.model
        if trial.place and trial.rank == (dist.get_rank() if dist.is_initialized() else 0):
            accumulation = trainer.args.gradient_accumulation_steps
            Flaw(model, trial.place, {BAD * accumulation})
        error = ""
        try:
            trainer.train()
        except BadStepError as raised:
            error = str(raised)
        weights = weights_of(trainer.model)
    saved = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
    return Found(weights, error, trainer.state.log_history, saved)


def run_all(folder: str, trials: list[Trial]) -> list[Found]:
    return [run(f"{folder}/{number}", trial) for number, trial in enumerate(trials)]


def unguarded(folder: str, case: Case, leaves_out: bool) -> dict[str, Tensor]:
    callbacks = [LeavesOut(BAD)] if leaves_out else []
    shards = sharding_on_cpus() if case.sharding else nullcontext()
    with shards, patch("tests.trainer.trained.LongContextTrainer", Unguarded):
        trainer = make_trainer(case, folder, is_patched=True, callbacks=callbacks)
        trainer.train()
    return weights_of(trainer.model)


def all_unguarded(folder: str, runs: list[tuple[Case, bool]]) -> list[dict[str, Tensor]]:
    return [unguarded(f"{folder}/{number}", *run) for number, run in enumerate(runs)]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_has_the_bits_of_one_that_nothing_guards_and_that_leaves_the_step_out(
    tmp_path: Path,
) -> None:
    """With torch's fused AdamW, which skips on the device, and with SGD, whose gradients are
    dropped; read at once, and a step later."""
    logging = replace(CASE, arguments=CASE.arguments | SAVES | {"logging_steps": 1})
    sgd = replace(CASE, arguments=USUAL | {"optim": "sgd", "optim_args": "momentum=0.9"})
    trials = [
        Trial(CASE),
        Trial(CASE, "loss", skips=1),
        Trial(CASE, LAYER, skips=1, late=True),
        Trial(sgd),
        Trial(sgd, "loss", skips=1),
        Trial(logging, "loss", skips=1, late=True),
    ]
    (found,) = run_launched(run_all, 1, str(tmp_path / "ours"), trials)
    pairs = [(case, left_out) for case in (CASE, sgd) for left_out in (False, True)]
    (wanted,) = run_launched(all_unguarded, 1, str(tmp_path / "unguarded"), pairs)
    for ours, number in zip(found, (0, 1, 1, 2, 3, 1), strict=True):
        assert not ours.error
        assert_equal(ours.weights, wanted[number])
    skipped = [[e for e in ours.logged if "skipped_step" in e] for ours in found]
    steps = [[e["skipped_step"] for e in entries] for entries in skipped]
    assert steps == [[BAD] * (number not in (0, 3)) for number in range(6)]
    assert [e["step"] for e in found[5].logged if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert "first on rank 0: the loss is nan" in skipped[1][0]["skipped"]
    assert LAYER in skipped[2][0]["skipped"]


def test_nothing_of_a_bad_step_is_saved_and_all_ranks_end_alike(tmp_path: Path) -> None:
    """NaN in rank 1's loss alone, and in one of its layers. A trainer that saves every step waits
    for what it has not read yet; one that doesn't ends in the step after the bad one."""
    saving = replace(CASE, config=RING, arguments=CASE.arguments | SAVES)
    ring = replace(CASE, config=RING)
    sft = trl.Case("sft", "sft", "text", RING, arguments=USUAL | SAVES, layers=2)
    trl.write_rows([sft], tmp_path / "3")
    trials = [
        Trial(saving, "loss", rank=1),
        Trial(saving, LAYER, rank=1, late=True),
        Trial(ring, LAYER, rank=1, late=True),
        Trial(sft, LAYER, rank=1, late=True, trl=True),
        Trial(replace(CASE, config={}), "loss", rank=1),
    ]
    by_rank = run_launched(run_all, 2, str(tmp_path), trials)
    for first, second in zip(*by_rank, strict=True):
        assert first.error == second.error
        assert first.error.startswith("step 4: ")
        assert "first on rank 1: " in first.error
        assert_equal(first.weights, second.weights)
        assert all(weight.isfinite().all() for weight in first.weights.values())
    kept = [f"checkpoint-{step}" for step in range(1, BAD)]
    assert [found.saved for found in by_rank[0]] == [kept, kept, [], kept, []]
    for found, place in zip(by_rank[0], ("the loss is nan", *[LAYER] * 3, "the"), strict=True):
        assert place in found.error
        assert re.search(
            r"; its rows: those that begin with \[\d+, .*\], \[\d+, .*\]\.", found.error
        )


@pytest.mark.timeout(400)
def test_under_fsdp2_shards_are_left_as_they_were(tmp_path: Path) -> None:
    """Four ranks, of which two share a row; found_inf stands beside weights that are DTensors."""
    trials = [
        Trial(SHARDED, "loss", rank=3, skips=1, late=True),
        Trial(SHARDED, LAYER, rank=2, late=True),
    ]
    by_rank = run_launched(run_all, 4, str(tmp_path), trials)
    plain = run_launched(all_unguarded, 4, str(tmp_path / "unguarded"), [(SHARDED, True)])
    skipped, ended = by_rank[0]
    assert [e["skipped_step"] for e in skipped.logged if "skipped_step" in e] == [BAD]
    assert_equal(skipped.weights, plain[0][0])
    assert "first on rank 2" in ended.error
    assert LAYER in ended.error


class Tried(NamedTuple):
    errors: list[str]
    logged: list[Any]


def resumed(folder: str) -> Tried:
    """A run that skips one step, and one that goes on from its checkpoint and meets another."""
    case = replace(CASE, arguments=CASE.arguments | SAVES)
    first = run(folder, Trial(case, "loss", skips=1))
    options = {"model": model_of(case), "skip_bad_steps": 1}
    trainer = make_trainer(case, Path(folder) / case.name, is_patched=True, **options)
    Flaw(trainer.long_context_handle.model, "loss", {1})
    with pytest.raises(BadStepError) as raised:
        trainer.train(resume_from_checkpoint=str(Path(folder) / case.name / "checkpoint-5"))
    spoilt: Any = model_of(case)
    spoilt.get_submodule(LAYER).weight.data[1, 2] = math.inf
    with pytest.raises(ValueError, match=f"{LAYER}.weight has 1 values that are not") as refused:
        make_trainer(case, f"{folder}/spoilt", is_patched=True, model=spoilt).train()
    model = trainer.model
    model.get_submodule(LAYER).weight.data[1, 2] = math.nan
    with pytest.raises(ValueError, match=f"{LAYER}.weight has 1 values that are not") as unsaved:
        trainer.save_model(f"{folder}/unsaved")
    assert not Path(f"{folder}/unsaved").exists()
    errors = [first.error, *(str(error.value) for error in (raised, refused, unsaved))]
    return Tried(errors, first.logged)


def test_a_resumed_trainer_knows_what_was_skipped_and_weights_are_looked_at(tmp_path: Path) -> None:
    (found,) = run_launched(resumed, 1, str(tmp_path))
    assert found.errors[0] == ""
    assert found.errors[1].startswith("step 6: ")
    assert "1 steps were skipped before it, and skip_bad_steps=1" in found.errors[1]
    assert "before the first step" in found.errors[2]
    assert "so nothing of it is saved" in found.errors[3]
    assert math.isfinite(found.logged[-1]["train_loss"])
