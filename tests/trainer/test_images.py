"""A trainer of a model that reads images, over several ranks per sequence, logs and learns what one
process with the stock model does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugin.launched import run_launched
from tests.trainer.test_exactness import check
from tests.trainer.trained import Case, model_of, sharded, train, train_all, weights_of

RING: dict[str, Any] = {"ring_degree": 2}
USUAL: dict[str, Any] = {"max_steps": 6}
ALONE = USUAL | {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
TWO = [
    Case(
        "pictures",
        "qwen3_vl",
        config=RING | {"checkpoint": "attention"},
        arguments=USUAL | {"gradient_accumulation_steps": 3},
        has_images=True,
    ),
    Case(
        "adapters, in the encoder too",
        "qwen2_5_vl",
        config={"ulysses_degree": 2, "layout": "contiguous"},
        arguments=USUAL | {"gradient_checkpointing": True},
        adapters={"target_modules": "all-linear"},
        has_images=True,
        every_row_has_images=True,
    ),
    Case(
        "smoothed",
        "qwen2_vl",
        config=RING | {"loss": "logits"},
        arguments=USUAL | {"label_smoothing_factor": 0.1},
        has_images=True,
    ),
    Case(
        "pictures in a hybrid",
        "qwen3_5",
        config=RING | {"layout": "contiguous", "checkpoint": "full"},
        arguments={"max_steps": 4},
        has_images=True,
    ),
    Case("pictures that see each other", "gemma3", config=RING, arguments=ALONE, has_images=True),
]
REPLICAS = Case("replicas", "qwen3_vl", config=RING, arguments=USUAL, has_images=True)
SHARDED = replace(
    REPLICAS,
    name="shards",
    arguments=USUAL | {"gradient_accumulation_steps": 2},
    sharding=sharded(RING, "Qwen3VLTextDecoderLayer", 1),
    every_row_has_images=True,
)
UNEVEN = replace(SHARDED, name="some without", every_row_has_images=False)


def test_two_ranks_train_on_images_as_one(tmp_path: Path) -> None:
    (one,) = run_launched(train_all, 1, TWO, str(tmp_path / "one"), False)
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
    with pytest.raises(ValueError, match=r"no images in the batch of ranks \[\d, \d\], in a step"):
        train(UNEVEN, folder, True)
    return found
