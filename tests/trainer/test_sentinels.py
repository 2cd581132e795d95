"""A sentinel beside a trainer: it sees drift, ends training before anything of it is saved, and
disturbs nothing."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.hf.sentinel import BOUNDS, DriftError, Sentinel
from longctx_patch.trainer.watching import SentinelCallback, first_document
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.trainer.trained import Case, make_trainer, model_of, numbers, sharded, weights_of

SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
CASE = Case(
    "watched",
    config={"ring_degree": 2},
    arguments=SAVES,
    adapters={"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
)
SHARDED = replace(CASE, sharding=sharded(CASE.config, "LlamaDecoderLayer", num_processes=2))


class Found(NamedTuple):
    logged: list[dict[str, float]]
    weights: dict[str, Tensor]
    saved: list[str]
    error: str


def watch(folder: str, every: int, case: Case = CASE) -> Found:
    error = ""
    with sharding_on_cpus() if case.sharding else nullcontext():
        trainer = make_trainer(
            case, folder, is_patched=True, model=model_of(case), sentinel_every=every
        )
        try:
            trainer.train()
        except DriftError as raised:
            error = str(raised)
    logged = [numbers(entry) for entry in trainer.state.log_history]
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return Found(logged, weights_of(trainer.model), saved, error)


def watch_all(folder: str) -> list[Found]:
    alone = Sentinel._alone

    def off(self: Sentinel, row: Tensor) -> tuple[Tensor, torch.dtype]:
        found, dtype = alone(self, row)
        return found * (1.01 if dist.get_rank() == 1 else 1.0), dtype

    replicas = watch(f"{folder}/replicas", 2, replace(CASE, config={}))
    with patch.object(Sentinel, "_alone", off):
        drifted = watch(f"{folder}/drifts", 2)
    plain, watched = (watch(f"{folder}/{every}", every, SHARDED) for every in (0, 2))
    return [plain, watched, replicas, drifted]


def test_drift_ends_training_and_without_it_no_number_differs(tmp_path: Path) -> None:
    """Ranks that share rows under FSDP2, with an adapter that draws dropout, which no check may
    move, and two replicas; one in which rank 1 is a hundredth off."""
    first, second = run_launched(watch_all, 2, str(tmp_path))
    plain, watched, replicas, drifted = first
    for found in (watched, replicas):
        drifts = {e["step"]: e["sentinel_error"] for e in found.logged if "sentinel_error" in e}
        assert list(drifts) == [2, 4]
        assert max(drifts.values()) < BOUNDS[torch.float32] / 10
        assert not found.error
    assert [entry for entry in watched.logged if "sentinel_error" not in entry] == plain.logged
    assert all(torch.equal(watched.weights[name], w) for name, w in plain.weights.items())
    assert second[3].error == drifted.error
    assert "differ by 9.9e-03 on rank 1 from those of this rank alone, beyond" in drifted.error
    assert drifted.saved == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("rows", "mask", "reason"),
    [
        ([{"prompt": "w1"}], None, "sentinel_every=2: the first row of train_dataset has no inp"),
        (None, None, "has no input_ids. Leave it out"),
        ([{"input_ids": [1, 2]}], object(), "was patched with a mask"),
    ],
)
def test_where_nothing_can_be_compared_it_is_refused(rows: Any, mask: Any, reason: str) -> None:
    handle = SimpleNamespace(mask=mask)
    with pytest.raises(ValueError, match=reason):
        SentinelCallback(SimpleNamespace(train_dataset=rows, long_context_handle=handle), 2)


def test_the_first_document_is_found_in_rows_of_any_trainer() -> None:
    assert first_document([{"input_ids": torch.tensor([5, 6, 7])}]) == [5, 6, 7]
    assert first_document([{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}]) == [5, 6]
    assert first_document([{"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}]) == [5, 6]
    assert first_document(iter([{"prompt_ids": [5], "completion_ids": [6]}])) == [5, 6]
