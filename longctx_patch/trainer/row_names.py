"""Which rows of a dataset a batch has, found by their tokens: a trainer's sampler doesn't say."""

from collections.abc import Mapping
from typing import Any

import torch

from longctx_patch.trainer.documents import documents_of

MOST_TOKENS = 2**26
"""Of the dataset that are read in search of a batch's rows."""


def rows_of_batch(batch: Mapping[str, Any], dataset: Any) -> str:
    """The numbers of a batch's rows in the trainer's dataset, from 0, in words; empty where rows
    can't be told, as in a stream, or in a dataset without `input_ids`.

    Args:
        batch: `input_ids` `[B, L]`, with `attention_mask` where rows are padded, and `position_ids`
            where several were joined.
    """
    wanted = [part.tolist() for part in documents_of(batch) if len(part)]
    if not wanted or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return ""
    found: dict[int, int] = {}
    left = MOST_TOKENS
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return ""
        ids = torch.as_tensor(row["input_ids"]).tolist()
        left -= len(ids)
        # A collator may have cut a row at its end.
        alike = (n for n, tokens in enumerate(wanted) if tokens == ids[: len(tokens)])
        found |= {number: index for number in alike if number not in found}
        if len(found) == len(wanted) or left < 0:
            break
    if not found:
        return ""
    numbers = ", ".join(str(found.get(number, "?")) for number in range(len(wanted)))
    return f"{numbers} of train_dataset"
