"""A batch's rows are found by their tokens, padded on either side, joined or cut."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from longctx_patch.trainer import row_names
from longctx_patch.trainer.row_names import rows_of_batch
from tests.trainer.trained import padded, rows

ROWS = rows(23, seed=1)
PICKED = [17, 3, 11]


def batch(**changes: Any) -> dict[str, Tensor]:
    return padded([ROWS[index] for index in PICKED]) | changes


def flipped() -> dict[str, Tensor]:
    return {name: tensor.flip(1) for name, tensor in batch().items()}


def joined() -> dict[str, Tensor]:
    picked = [ROWS[index]["input_ids"] for index in PICKED]
    positions = [torch.arange(len(ids)) for ids in picked]
    ids = torch.tensor([token for ids in picked for token in ids])
    return {"input_ids": ids[None], "position_ids": torch.cat(positions)[None]}


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS)])
def test_rows_are_named_by_their_numbers(dataset: Any) -> None:
    assert rows_of_batch(batch(), dataset) == "17, 3, 11 of train_dataset"
    assert rows_of_batch(joined(), dataset) == "17, 3, 11 of train_dataset"
    cut = {name: tensor[:, :8] for name, tensor in batch().items()}
    assert rows_of_batch(cut, dataset) == "17, 3, 11 of train_dataset"
    backwards = [{"input_ids": row["input_ids"][::-1]} for row in ROWS]
    assert rows_of_batch(flipped(), backwards) == "17, 3, 11 of train_dataset"


def test_what_is_not_found_is_said_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_names, "MOST_TOKENS", sum(len(r["input_ids"]) for r in ROWS[:5]))
    assert rows_of_batch(batch(), ROWS) == "?, 3, ? of train_dataset"
    assert rows_of_batch(batch(), iter(ROWS)) == ""
    assert rows_of_batch(batch(), [{"prompt": "w1"}]) == ""
    assert rows_of_batch({"prompt_ids": torch.zeros(1, 2)}, ROWS) == ""
