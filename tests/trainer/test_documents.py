"""The tokens of a batch's documents, however a collator marks padding and joins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.trainer.documents import documents_of

DOCUMENTS = [[5, 6, 7, 8, 9], [4, 3], [2, 2, 1]]


def padded(documents: list[list[int]], *, left: bool = False, to: int = 7) -> tuple[Tensor, Tensor]:
    """Ids and mask."""
    ids = [[0] * (to - len(d)) + d if left else d + [0] * (to - len(d)) for d in documents]
    mask = [[1] * len(d) + [0] * (to - len(d)) for d in documents]
    return torch.tensor(ids), torch.tensor([row[::-1] if left else row for row in mask])


def joined() -> dict[str, Tensor]:
    positions = [position for d in DOCUMENTS for position in range(len(d))]
    ids = [token for d in DOCUMENTS for token in d]
    return {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}


def batches() -> dict[str, dict[str, Any]]:
    right, left = padded(DOCUMENTS), padded(DOCUMENTS, left=True)
    row, ones = joined(), torch.ones(1, 10, dtype=torch.long)
    counted = torch.arange(7).expand(3, 7)
    prompts = padded([d[:1] for d in DOCUMENTS], left=True, to=3)
    rest = padded([d[1:] for d in DOCUMENTS])
    generated = {"prompt_ids": prompts[0], "prompt_mask": prompts[1]}
    generated |= {"completion_ids": rest[0], "completion_mask": rest[1]}
    more = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in row.items()}
    return {
        "padded right": {"input_ids": right[0], "attention_mask": right[1]},
        "padded left": {"input_ids": left[0], "attention_mask": left[1]},
        "with positions of columns": {
            **{"input_ids": left[0], "attention_mask": left[1]},
            "position_ids": counted,
        },
        "joined": row,
        "joined, with a mask": row | {"attention_mask": ones},
        "joined and padded": more | {"attention_mask": (torch.arange(13) < 10).long()[None]},
        "lengths": {"input_ids": row["input_ids"], "seq_lengths": [[5, 2, 3, 0]]},
        "generated": generated,
    }


@pytest.mark.parametrize("name", batches())
def test_documents_are_found(name: str) -> None:
    assert [document.tolist() for document in documents_of(batches()[name])] == DOCUMENTS


def test_a_batch_without_rows_has_none_and_odd_lengths_join_none() -> None:
    assert list(documents_of({"inputs_embeds": torch.zeros(2, 3, 4)})) == []
    assert list(documents_of({"input_ids": [[1, 2]]})) == []
    row = joined()["input_ids"]
    for odd in ([[4, 4]], [[5, 2], [3]]):
        (found,) = documents_of({"input_ids": row, "seq_lengths": odd})
        assert torch.equal(found, row[0])
