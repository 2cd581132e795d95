"""What one unpatched process computes, on whole rows."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """One step of the unpatched model over each document by itself, with the loss written out.

    A router's loss is over the tokens of all documents together.
    """
    model = build_small_model(small_config, getattr(torch, dtype))
    with _one_thread():
        outputs = [
            (model(input_ids=ids[None], use_cache=False), labels)
            for ids, labels in _documents(rows)
        ]
        loss = _token_loss(outputs) + _router_loss(model, [out for out, _ in outputs])
        loss.backward()
    logits = torch.cat([out.logits[0].detach() for out, _ in outputs])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(loss=loss.item(), logits_NV=logits, grads=grads)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute as the ranks do: sums that are cut for threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _token_loss(outputs: Sequence[tuple[Any, Tensor]]) -> Tensor:
    losses = [
        F.cross_entropy(out.logits[0, :-1], labels[1:], ignore_index=IGNORE_INDEX, reduction="sum")
        for out, labels in outputs
    ]
    count = sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in outputs)
    return torch.stack(losses).sum() / count


def _router_loss(model: Any, outputs: Sequence[Any]) -> Tensor | float:
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    by_layer = zip(*(out.router_logits for out in outputs), strict=True)
    load_balancing_loss = sys.modules[type(model).__module__].load_balancing_loss_func
    loss: Tensor = load_balancing_loss(
        tuple(torch.cat(parts) for parts in by_layer), model.num_experts, model.num_experts_per_tok
    )
    return model.router_aux_loss_coef * loss


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
