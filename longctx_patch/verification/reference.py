"""The numbers of a training step, those of one unpatched process among them, and their errors."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.model.transformers_api import router_weight
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.plans.traffic import Traffic
from longctx_patch.verification.shrink import build_small_model

Rows = list[dict[str, list[int]]]


class Step(NamedTuple):
    """One training step, of one process or of a rank; tensors are in the model's dtype."""

    loss: float
    grads: dict[str, Tensor]
    logits: Tensor | None = None
    """One process has those of all tokens of all rows, one row after another; a rank has those of
    its shard, where they were made."""
    sent: Traffic = Traffic()
    planned: Traffic = Traffic()
    mask: str = "stock attention"


def train(model: nn.Module, batch: Mapping[str, Any], handle: PatchHandle | None = None) -> Step:
    """Loss and gradients of one batch; a parameter that has none stays out. A `handle` tells what
    was sent, and what was planned to be."""
    loss = model(**batch).loss
    loss.backward()
    step = Step(loss.item(), gradients(model))
    if handle is None:
        return step
    step = step._replace(sent=Traffic(handle.counters.messages, handle.counters.bytes))
    if (check := handle.first_step) is None:
        return step
    planned = check.planned_forward() + check.planned_backward()
    return step._replace(planned=planned, mask=check.masks)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mean_gradients(ranks: Sequence[Step]) -> dict[str, Tensor]:
    """The mean over ranks, as DDP takes it; a rank without a gradient counts as zeros."""
    names = dict.fromkeys(name for step in ranks for name in step.grads)
    found = {name: [step.grads[name] for step in ranks if name in step.grads] for name in names}
    return {name: torch.stack(grads).sum(0) / len(ranks) for name, grads in found.items()}


def gradient_errors(mean: Mapping[str, Tensor], stock: Step) -> dict[str, float]:
    """Each parameter's relative error, 0 where both gradients are zeros or missing."""
    return {
        name: _error(mean.get(name), stock.grads.get(name))
        for name in dict.fromkeys([*stock.grads, *mean])
    }


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    some = expected if found is None else found
    assert some is not None
    found, expected = (torch.zeros_like(some) if g is None else g for g in (found, expected))
    return 0.0 if torch.equal(found, expected) else relative_error(found, expected)


def worst_of(errors: Mapping[str, float]) -> str:
    """The parameter whose gradient has the largest error; NaN is the largest."""
    return max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))


def make_rows(vocab_size: int, seq_len: int, *, packed: bool = False) -> Rows:
    """Two rows of random tokens: one without loss in its first part, as after a long prompt (so
    some ranks hold no label of it), and a shorter one, which gets padded.

    `packed`: each row has several documents, of one token up to most of the row.
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
    return lengths if sum(lengths) == length else [length]


def compute_reference(small_config: Any, rows: Rows, dtype: str) -> Step:
    """One step of the unpatched model, with the loss written out; each document by itself.

    A router's loss is over the tokens of all documents together.
    """
    model = build_small_model(small_config, getattr(torch, dtype))
    batches = list(_batches(rows))
    with one_thread():
        outputs = [model(input_ids=batch.ids, use_cache=False) for batch in batches]
        loss = _token_loss(outputs, batches) + _router_loss(model, outputs, batches)
        loss.backward()
    logits = torch.cat(
        [out.logits.detach()[batch.is_real] for out, batch in zip(outputs, batches, strict=True)]
    )
    return Step(loss.item(), gradients(model), logits)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the ranks do: sums split over threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Batch(NamedTuple):
    """Documents of one token each or more, `[B, L]`, padded on the right."""

    ids: Tensor
    next_labels: Tensor
    is_real: Tensor


def _batches(rows: Rows) -> Iterator[_Batch]:
    """Plain rows as one padded batch; each document of packed rows as its own batch."""
    if not any("seq_lengths" in row for row in rows):
        yield _padded([(row["input_ids"], row.get("labels", row["input_ids"])) for row in rows])
        return
    for row in rows:
        ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
        for start, stop in pairwise(accumulate(row["seq_lengths"], initial=0)):
            part = slice(start, stop)
            yield _padded([(ids[part], labels[part])])


def _padded(documents: Sequence[tuple[list[int], list[int]]]) -> _Batch:
    longest = max(len(ids) for ids, _ in documents)

    def stacked(values: Iterable[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in values])

    return _Batch(
        ids=stacked((ids for ids, _ in documents), 0),
        next_labels=stacked(([*labels[1:], IGNORE_INDEX] for _, labels in documents), IGNORE_INDEX),
        is_real=stacked(([1] * len(ids) for ids, _ in documents), 0).bool(),
    )


def _token_loss(outputs: Sequence[Any], batches: Sequence[_Batch]) -> Tensor:
    losses = [
        F.cross_entropy(
            out.logits.flatten(0, 1),
            batch.next_labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        for out, batch in zip(outputs, batches, strict=True)
    ]
    count = sum(int((batch.next_labels != IGNORE_INDEX).sum()) for batch in batches)
    return torch.stack(losses).sum() / count


def _router_loss(model: Any, outputs: Sequence[Any], batches: Sequence[_Batch]) -> Tensor | float:
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    by_layer = zip(*(out.router_logits for out in outputs), strict=True)
    real = torch.cat([batch.is_real.flatten() for batch in batches])
    load_balancing_loss = sys.modules[type(model).__module__].load_balancing_loss_func
    loss: Tensor = load_balancing_loss(
        tuple(torch.cat(parts)[real] for parts in by_layer),
        model.num_experts,
        model.num_experts_per_tok,
    )
    return getattr(model, router_weight(model)) * loss


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by the norm of `expected`, in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())
