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


PAIRS = [
    {"prompt_ids": row["input_ids"][:4], "chosen_ids": row["input_ids"][4:], "rejected_ids": [n, 1]}
    for n, row in enumerate(ROWS)
]


def answered(names: list[str], most: slice = slice(None)) -> dict[str, Tensor]:
    """As TRL's collators make rows of pairs: all rows with one answer, then those with the other,
    cut at one of their ends."""
    picked = [PAIRS[index]["prompt_ids"] + PAIRS[index][name] for name in names for index in PICKED]
    return padded([{"input_ids": ids[most], "labels": ids[most]} for ids in picked])


@pytest.mark.parametrize("dataset", [PAIRS, Dataset.from_list(PAIRS)])
def test_rows_of_preferences_are_named_once(dataset: Any) -> None:
    said = "17, 3, 11 of train_dataset"
    assert rows_of_batch(answered(["chosen_ids", "rejected_ids"]), dataset) == said
    for ends in (slice(None, 6), slice(-6, None)):
        assert rows_of_batch(answered(["chosen_ids", "rejected_ids"], ends), dataset) == said
    single = [{"prompt_ids": p["prompt_ids"], "completion_ids": p["chosen_ids"]} for p in PAIRS]
    assert rows_of_batch(answered(["chosen_ids"]), single) == said


def test_rows_of_generated_answers_are_named_by_their_prompts() -> None:
    """Two answers of each prompt; prompts are padded on the left. Which rows they are only the
    trainer's tokenizer can say."""
    prompts = [{"prompt": f"row {number}"} for number in range(300)]

    def tokenize(texts: list[str]) -> list[list[int]]:
        return [[7] * (1 + int(text[4:]) % 3) + [int(text[4:])] for text in texts]

    ids = tokenize([prompts[index]["prompt"] for index in (299, 299, 17, 17)])
    longest = max(map(len, ids))
    batch = {
        "prompt_ids": torch.tensor([[0] * (longest - len(row)) + row for row in ids]),
        "prompt_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]),
        "completion_ids": torch.ones(4, 3).long(),
        "completion_mask": torch.ones(4, 3).long(),
    }
    assert rows_of_batch(batch, prompts, tokenize) == "299, 17 of train_dataset"
    assert rows_of_batch(batch, prompts) == ""
    assert rows_of_batch(batch, ROWS, tokenize) == ""
