"""A trainer of a model that reads images, over several ranks per sequence, logs and learns what one
process with the stock model does."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.seeing import seen_together
from tests.plugin.launched import run_launched
from tests.trainer.test_exactness import check
from tests.trainer.trained import (
    Case,
    make_trainer,
    model_of,
    sharded,
    train,
    train_all,
    weights_of,
)

RING: dict[str, Any] = {"ring_degree": 2}
KEPT = RING | {"checkpoint": "attention"}
ALONE = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
STOCK, CHECKPOINTED = ({"gradient_checkpointing": on} for on in (False, True))
THRICE, TWICE = ({"gradient_accumulation_steps": number} for number in (3, 2))
SMOOTHED = ALONE | TWICE | CHECKPOINTED | {"label_smoothing_factor": 0.1}
TWO = [
    Case("pictures", "qwen3_vl", config=KEPT, arguments=THRICE, has_images=True),
    Case(
        "adapters, in the encoder too",
        "qwen2_5_vl",
        config={"ulysses_degree": 2, "layout": "contiguous"},
        arguments=CHECKPOINTED,
        adapters={"target_modules": "all-linear"},
        has_images=True,
        every_row_has_images=True,
    ),
    Case(
        "some batches of text",
        "qwen2_vl",
        config=RING | {"loss": "logits"},
        arguments=SMOOTHED,
        has_images=True,
    ),
    Case("pictures that see each other", "gemma3", config=RING, arguments=ALONE, has_images=True),
]
REPLICAS = Case("replicas", "qwen3_vl", config=RING, has_images=True)
SHARDED = replace(
    REPLICAS,
    name="shards",
    arguments=TWICE,
    sharding=sharded(RING, "Qwen3VLTextDecoderLayer", 1),
    every_row_has_images=True,
)
UNEVEN = replace(SHARDED, name="some without", every_row_has_images=False)


def test_two_ranks_train_on_images_as_one(tmp_path: Path) -> None:
    # DDP of one process fails with transformers' checkpointing where a batch has no images.
    stock = [replace(case, arguments={**case.arguments, **STOCK}) for case in TWO]
    (one,) = run_launched(train_all, 1, stock, str(tmp_path / "one"), False)
    check(TWO, run_launched(train_all, 2, TWO, str(tmp_path / "two"), True), one)
    for case, found in zip(TWO, one, strict=True):
        before = weights_of(model_of(case))
        learned = [n for n, w in found.weights.items() if not torch.equal(w, before[n])]
        assert any("visual" in name or "vision_tower" in name for name in learned), case.name


def test_replicas_train_on_images_as_two_processes(tmp_path: Path) -> None:
    cases = [REPLICAS, SHARDED]
    two, _ = run_launched(train_all, 2, cases, str(tmp_path), False)
    by_rank = run_launched(_train_and_refuse, 4, cases, str(tmp_path))
    check(cases, by_rank, two)


def _train_and_refuse(cases: list[Case], folder: str) -> Any:
    found = train_all(cases, folder, True)
    with pytest.raises(
        ValueError, match=r"no pixel_values in the batch of ranks \[\d, \d\], in a step"
    ):
        train(UNEVEN, folder, True)
    return found


DRAWN = replace(
    REPLICAS, name="drawn", arguments={"max_steps": 3, "dataloader_num_workers": 1}, num_rows=12
)


def with_noise(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch whose pixels are drawn by whoever collates it."""
    batch = seen_together("qwen3_vl", rows)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"] + torch.randn_like(batch["pixel_values"])
    return batch


def losses_of_drawn_images(folder: str, is_patched: bool) -> list[float]:
    this: Any = multiprocessing.current_process()
    this._config["daemon"] = False  # else it may not start workers
    multiprocessing.set_start_method("fork", force=True)  # as in a script
    trainer = make_trainer(DRAWN, folder, is_patched=is_patched, data_collator=with_noise)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_workers_of_a_group_draw_the_same_images(tmp_path: Path) -> None:
    (wanted,) = run_launched(losses_of_drawn_images, 1, str(tmp_path / "one"), False)
    for found in run_launched(losses_of_drawn_images, 2, str(tmp_path / "two"), True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert len(set(wanted)) == DRAWN.arguments["max_steps"]
