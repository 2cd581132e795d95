"""Which rows of a dataset a batch has, found by their tokens: a trainer's sampler doesn't say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from longctx_patch.trainer.documents import documents_of

MOST_TOKENS = 2**26
"""Of the dataset that are read in search of a batch's rows."""
AT_ONCE = 256
"""Prompts that are tokenized together."""
ANSWERS = "chosen_ids", "rejected_ids", "completion_ids"
"""What may stand behind `prompt_ids` in rows of TRL's trainers, each with its prompt a row of a
batch."""
Tokens = list[int]
Tokenize = Callable[[list[Any]], Sequence[Tokens]]


def rows_of_batch(batch: Mapping[str, Any], dataset: Any, tokenize: Tokenize | None = None) -> str:
    """The numbers of a batch's rows in the trainer's dataset, from 0, in words; empty where rows
    can't be told, as in a stream, or in a dataset without tokens.

    Args:
        batch: what `documents_of` takes.
        dataset: rows with `input_ids`, or with `prompt_ids` and one or two answers of TRL's; where
            answers are generated, rows with a `prompt`.
        tokenize: gives the tokens of such prompts.
    """
    generates = "prompt_ids" in batch
    if generates:
        batch = {"input_ids": batch["prompt_ids"], "attention_mask": batch.get("prompt_mask")}
    wanted = [part.tolist() for part in documents_of(batch) if len(part)]
    if not wanted or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return ""
    found: dict[int, int] = {}
    left, most = MOST_TOKENS, 1
    for index, rows in enumerate(_prompts(dataset, tokenize) if generates else _rows(dataset)):
        most = max(most, len(rows))
        alike = (n for n, tokens in enumerate(wanted) if any(_is_of(tokens, row) for row in rows))
        found |= {number: index for number in alike if number not in found}
        left -= sum(map(len, rows))
        if len(found) == len(wanted) or left < 0:
            break
    if not found:
        return ""
    numbers = [str(found.get(number, "?")) for number in range(len(wanted))]
    if generates or most > 1:  # several rows of the batch are of one of the dataset
        numbers = [*dict.fromkeys(numbers)]
    return f"{', '.join(numbers)} of train_dataset"


def _is_of(tokens: Tokens, row: Tokens) -> bool:
    """Whether a collator may have made them of a row, of which it cuts an end."""
    return tokens in (row[: len(tokens)], row[-len(tokens) :])


def _rows(dataset: Any) -> Iterator[list[Tokens]]:
    """Yield what each row of the dataset may be in a batch, up to one that has no tokens."""
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping):
            return
        if "input_ids" in row:
            yield [_listed(row["input_ids"])]
        elif "prompt_ids" in row:
            prompt = _listed(row["prompt_ids"])
            yield [prompt + _listed(row[name]) for name in ANSWERS if name in row]
        else:
            return


def _prompts(dataset: Any, tokenize: Tokenize | None) -> Iterator[list[Tokens]]:
    """Yield the prompt of each row, up to one that has none."""
    for start in range(0, len(dataset) if tokenize else 0, AT_ONCE):
        rows = [dataset[index] for index in range(start, min(start + AT_ONCE, len(dataset)))]
        if tokenize is None or not all(isinstance(r, Mapping) and "prompt" in r for r in rows):
            return
        yield from ([_listed(ids)] for ids in tokenize([row["prompt"] for row in rows]))


def _listed(ids: Any) -> Tokens:
    found: Tokens = torch.as_tensor(ids).tolist()
    return found
