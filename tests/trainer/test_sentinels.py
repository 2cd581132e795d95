"""A sentinel beside a trainer: it sees drift, ends training before anything of it is saved, and
disturbs nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.health.sentinel import BOUNDS, DriftError, Sentinel
from longctx_patch.trainer.sentinels import SentinelMixin
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, make_trainer, model_of, numbers, rows, weights_of
from tests.trl import cases as trl

RING = {"ring_degree": 2}
SAVES = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
CASE = Case("watched", config=RING, arguments=SAVES | {"gradient_accumulation_steps": 2})
PREFERENCES = trl.Case("dpo", "dpo", "pairs", RING, adapter=True, arguments={"max_steps": 4})
GENERATES = {"max_completion_length": 8, "num_generations": 2, "beta": 0.1, "max_steps": 2}
GENERATED = trl.Case("grpo", "grpo", "prompts", RING, adapter=True, arguments=GENERATES)


class Found(NamedTuple):
    logged: list[dict[str, float]]
    weights: dict[str, Tensor]
    looked_at: list[list[int]]
    saved: list[str]
    error: str


@contextmanager
def observed(model: Any, factor: float) -> Iterator[list[list[int]]]:
    """What the sentinel looks at. Where ranks share it, rank 1's attention is `factor` times it."""
    looked_at: list[list[int]] = []
    check, alone, is_alone = Sentinel.check, Sentinel._alone, False

    def watched(self: Sentinel, ids: Tensor) -> Any:
        looked_at.append(ids.tolist())
        return check(self, ids)

    def by_itself(self: Sentinel, row: Tensor) -> Any:
        nonlocal is_alone
        is_alone = True
        try:
            return alone(self, row)
        finally:
            is_alone = False

    def spoil(module: Any, _: Any, output: Any) -> Any:
        flawed = dist.get_rank() == 1 and not module.training and not is_alone
        return (output[0] * (factor if flawed else 1.0), *output[1:])

    model.model.layers[0].self_attn.register_forward_hook(spoil)
    with patch.object(Sentinel, "check", watched), patch.object(Sentinel, "_alone", by_itself):
        yield looked_at


def watch(folder: str, case: Any, every: int, factor: float = 1.0) -> Found:
    if isinstance(case, trl.Case):
        trainer = trl.make_trainer(case, Path(folder) / case.name, is_patched=True)
        trainer._sentinel_every = every
    else:
        given = {"model": model_of(case), "sentinel_every": every}
        trainer = make_trainer(case, folder, is_patched=True, **given)
    error = ""
    with observed(trainer.long_context_handle.model, factor) as looked_at:
        try:
            trainer.train()
        except DriftError as raised:
            error = str(raised)
    logged = [numbers(entry) for entry in trainer.state.log_history]
    saved = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
    return Found(logged, weights_of(trainer.model), looked_at, saved, error)


def watch_all(folder: str) -> list[Found]:
    return [
        watch(f"{folder}/0", CASE, 0),
        watch(f"{folder}/1", CASE, 2),
        watch(f"{folder}/2", replace(CASE, config={}), 2),
        watch(f"{folder}/3", CASE, 1, factor=1.05),
        watch(folder, PREFERENCES, 2),
        watch(folder, GENERATED, 1),
    ]


def drifts(found: Found) -> dict[int, float]:
    entries = [entry for entry in found.logged if "sentinel_error" in entry]
    assert all(entry.keys() == {"sentinel_error", "step"} for entry in entries)
    return {int(entry["step"]): entry["sentinel_error"] for entry in entries}


@pytest.mark.timeout(400)
def test_drift_ends_training_and_without_it_no_number_differs(tmp_path: Path) -> None:
    """Two ranks that share rows; as replicas of two rows; a hundredth and more too much on rank 1;
    TRL's pairs, and rows that it generates."""
    trl.write_rows([PREFERENCES, GENERATED], tmp_path)
    by_rank = run_launched(watch_all, 2, str(tmp_path))
    plain, watched, apart, drifted, pairs, generated = by_rank[0]
    assert not plain.looked_at
    assert [entry for entry in watched.logged if "sentinel_error" not in entry] == plain.logged
    assert all(torch.equal(watched.weights[name], w) for name, w in plain.weights.items())
    for found, steps in ((watched, [2, 4]), (pairs, [2, 4]), (generated, [1, 2])):
        assert list(drifts(found)) == steps
        assert max(drifts(found).values()) < BOUNDS[torch.float32] / 10
        assert not found.error
    trained = [row["input_ids"] for row in rows(50, seed=1)]
    for found, other in zip(*(ranks[1:3] for ranks in by_rank), strict=True):
        assert all(ids in trained for ids in found.looked_at + other.looked_at)
    assert watched.looked_at == by_rank[1][1].looked_at
    assert apart.looked_at != by_rank[1][2].looked_at
    assert len(pairs.looked_at) == 2
    for ranks in by_rank:
        assert ranks[3].error == drifted.error
        assert "for the second time in a row" in ranks[3].error
        assert list(drifts(ranks[3])) == [1]
        assert ranks[3].saved == ["checkpoint-1"]


class Fake:
    """What the overrides need of a trainer."""

    model_wrapped = None
    args = SimpleNamespace(should_log=True)

    def __init__(self, mask: Any = None) -> None:
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.long_context_handle = SimpleNamespace(mask=mask)

    def compute_loss(self, *_: Any) -> None:
        pass

    def _maybe_log_save_evaluate(self) -> None:
        pass


class Watched(SentinelMixin, Fake):  # type: ignore[misc]
    _sentinel_every = 2


@pytest.mark.parametrize(
    ("batch", "mask", "reason"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 2)}, None, "has no rows of input_ids"),
        ({"input_ids": torch.zeros(3, 1).long()}, None, "two tokens or more"),
        ({"input_ids": torch.zeros(1, 9).long()}, object(), "was patched with a mask"),
    ],
)
def test_why_nothing_is_compared_is_said_once(
    batch: dict[str, Any], mask: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, model = Watched(mask), SimpleNamespace(training=True)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            trainer.compute_loss(model, batch)
            trainer.state.global_step = step
            trainer._maybe_log_save_evaluate()
            trainer._maybe_log_save_evaluate()  # as at the end of an epoch
    (record,) = caplog.records
    assert "sentinel_every=2: nothing is compared at step 2" in record.getMessage()
    assert reason in record.getMessage()
    assert trainer.state.log_history == []
