import pytest
import torch

from longctx_patch.loss.law import count_valid_tokens, sequence_parallel_loss


def test_shards_add_up_to_the_mean() -> None:
    logits = torch.randn(1, 10, 5, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 2, 3, -100, -100, 0, 4, 1, -100]])
    wanted = torch.nn.functional.cross_entropy(logits[0], labels[0])
    parts = [
        sequence_parallel_loss(
            logits[:, cut], labels[:, cut], num_valid_tokens=6, num_averaged_ranks=2
        )
        for cut in (slice(0, 3), slice(3, 10))
    ]
    assert torch.stack(parts).mean().item() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor([0])])
def test_no_valid_token_is_zero_with_gradient(count: int | torch.Tensor) -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    labels = torch.full((1, 3), -100)
    loss = sequence_parallel_loss(logits, labels, num_valid_tokens=count, num_averaged_ranks=4)
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_counting_over_micro_batches() -> None:
    batches = [{"shift_labels": torch.tensor([[1, -100]])}, {"shift_labels": torch.tensor([[3]])}]
    assert count_valid_tokens(batches) == 2
    assert count_valid_tokens([]) == 0
    assert count_valid_tokens(batches[0]) == 1  # type: ignore[arg-type]  # one batch
    with pytest.raises(ValueError, match=r"got a list without shift_labels.*Collate first"):
        count_valid_tokens([[{"input_ids": [1]}]])  # type: ignore[list-item]
