"""Gradients in evaluation mode, where nothing is checkpointed, are refused; evaluation is not.

`from_pretrained` returns a model in evaluation mode. A loop without `model.train()` kept all
activations, and trained without the proof of its first step.
"""

from typing import Any

import pytest
import torch

from tests.hf.tiny import tiny_model, token_rows
from tests.memory.trained import Trained

REFUSAL = r"gradients in evaluation mode.*no layer would be checkpointed.*Call model\.train\(\)"


def patched(**config: Any) -> tuple[Any, dict[str, Any]]:
    """A patched model in evaluation mode and a sharded batch with labels."""
    it = Trained(tiny_model().eval(), **config)
    return it.model, it.collate(token_rows(16))


def unlabelled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if "labels" not in name}


@pytest.mark.parametrize(
    "config",
    [{"checkpoint": "none"}, {"checkpoint": "attention", "loss": "logits"}, {"checkpoint": "auto"}],
)
def test_a_loss_with_gradients_is_refused_until_the_model_trains(config: dict[str, Any]) -> None:
    model, batch = patched(**config)
    with pytest.raises(ValueError, match=REFUSAL):
        model(**batch)
    with torch.no_grad():
        evaluated = model(**batch).loss
    model.train()
    loss = model(**batch).loss
    loss.backward()
    assert torch.equal(loss.detach(), evaluated)


def test_passes_that_nobody_goes_backward_from_are_allowed() -> None:
    """Scoring without labels (as a reward model does), and a model with frozen parameters."""
    model, batch = patched(checkpoint="full")
    scores = model(**unlabelled(batch)).logits
    assert scores.requires_grad
    with pytest.raises(ValueError, match=REFUSAL):
        scores.sum().backward()
    whole = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    model(**whole).loss.backward()  # whole rows take the stock path
    assert model.generate(batch["input_ids"], max_new_tokens=2).shape == (2, 18)
    model.requires_grad_(False)
    assert not model(**batch).loss.requires_grad
