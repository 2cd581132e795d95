from functools import partial
from typing import Any

import pytest
import torch

from longctx_patch.loss.law import (
    Scale,
    count_valid_tokens,
    replica_scale,
    sum_of_token_losses,
)


def test_shards_add_up_to_the_mean() -> None:
    logits = torch.randn(1, 10, 5, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 2, 3, -100, -100, 0, 4, 1, -100]])
    wanted = torch.nn.functional.cross_entropy(logits[0], labels[0])
    parts = [
        Scale(6, 2).loss(sum_of_token_losses(logits[:, cut], labels[:, cut]))
        for cut in (slice(0, 3), slice(3, 10))
    ]
    assert torch.stack(parts).mean().item() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor([0])])
def test_no_valid_token_is_zero_with_gradient(count: int | torch.Tensor) -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    labels = torch.full((1, 3), -100)
    loss = Scale(count, 4).loss(sum_of_token_losses(logits, labels))
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
def test_an_evaluated_batch_without_labels_has_no_mean(num_items: Any) -> None:
    """As in torch, whose mean over no label is NaN."""
    nothing = torch.zeros(())
    scale = partial(replica_scale, num_items, group_labels=0, group_ranks=2)
    assert scale(training=False).loss(nothing).isnan()
    assert scale(training=True).loss(nothing) == 0
    others = replica_scale(3, group_labels=0, group_ranks=2, training=False)
    assert others.loss(nothing) == 0  # other replicas have labels


def test_counting_over_micro_batches() -> None:
    batches = [{"shift_labels": torch.tensor([[1, -100]])}, {"shift_labels": torch.tensor([[3]])}]
    assert count_valid_tokens(batches) == 2
    assert count_valid_tokens([]) == 0
    assert count_valid_tokens(batches[0]) == 1  # type: ignore[arg-type]  # one batch
    with pytest.raises(ValueError, match=r"got a list without shift_labels.*Collate first"):
        count_valid_tokens([[{"input_ids": [1]}]])  # type: ignore[list-item]
