"""What one unpatched process computes, on whole rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.loss import IGNORE_INDEX
from longctx_patch.verification.shrink import build_small_model

Rows = list[dict[str, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one unpatched process computes. Gradients and logits in the model's dtype."""

    loss: float
    logits_NV: Tensor
    """Of all tokens of all rows, one after another."""
    grads: dict[str, Tensor]


def make_rows(vocab_size: int, seq_len: int, *, packed: bool = False) -> Rows:
    """Two rows of random tokens: one without loss in its first part, as after a long prompt (so
    some ranks hold no label of it), and a shorter one, which gets padded.

    `packed`: of several documents, of one token up to most of a row.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (2, seq_len), generator=generator).tolist()
    prompt = seq_len * 2 // 5
    rows: Rows = [
        {"input_ids": tokens[0], "labels": [IGNORE_INDEX] * prompt + tokens[0][prompt:]},
        {"input_ids": tokens[1][: max(2, seq_len * 3 // 4)]},
    ]
    for row in rows if packed else []:
        row["seq_lengths"] = _cut(len(row["input_ids"]))
    return rows


def _cut(length: int) -> list[int]:
    """Lengths of documents: a short one, one token, and ever longer ones."""
    lengths = [max(1, length // 9), 1]
    while (rest := length - sum(lengths)) > 0:
        lengths.append(min(rest, 2 * max(lengths)))
    return [n for n in lengths if sum(lengths) == length] or [length]


def compute_reference(small_config: Any, rows: Rows, dtype: str) -> Reference:
    """One step of the unpatched model over each document by itself, with the loss written out."""
    model = build_small_model(small_config, getattr(torch, dtype))
    loss_sum, num_labels, logits = torch.zeros((), dtype=torch.float64), 0, []
    for ids, labels in _documents(rows):
        logits_LV = model(input_ids=ids[None], use_cache=False).logits[0]
        logits.append(logits_LV.detach())
        loss_sum = loss_sum + F.cross_entropy(
            logits_LV[:-1], labels[1:], ignore_index=IGNORE_INDEX, reduction="sum"
        )
        num_labels += int((labels[1:] != IGNORE_INDEX).sum())
    loss = loss_sum / num_labels
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(loss=loss.item(), logits_NV=torch.cat(logits), grads=grads)


def _documents(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """(input_ids, unshifted labels) of each document."""
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        labels = torch.tensor(row.get("labels", row["input_ids"]))
        lengths = row.get("seq_lengths", [len(ids)])
        yield from zip(ids.split(lengths), labels.split(lengths), strict=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())
