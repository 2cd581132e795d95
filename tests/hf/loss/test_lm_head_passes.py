"""Passes of a model with the loss inside its head: those without labels are stock; those that would
bypass the loss, change its logits or have gradients in evaluation mode are refused."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from longctx_patch import LongContextConfig, patch
from longctx_patch.config import LossName
from tests.hf.loss.test_lm_head import LENGTH, collated
from tests.hf.steps import TOLERANCE
from tests.hf.tiny import VOCABULARY, tiny_model, token_rows
from tests.memory.trained import Trained
from tests.reference import relative_error


def test_a_loss_that_the_model_makes_by_itself_is_refused() -> None:
    """Liger Kernel's fused loss is one: its forward calls neither the head nor our loss."""
    for loss in ("chunked", "logits"):
        model: Any = tiny_model().train()
        handle = patch(model, LongContextConfig(loss=loss))
        batch = collated(handle)

        def forward(self: Any, labels: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
            hidden = self.model(**kwargs).last_hidden_state
            logits = hidden @ self.lm_head.weight.t()
            return CausalLMOutputWithPast(
                loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            )

        model.forward = MethodType(forward, model)
        with pytest.raises(RuntimeError, match=r"TRL.* fused_linear_cross_entropy=False"):
            model(**batch)
        del model.forward
        model(**batch).loss.backward()


def test_other_passes_are_stock() -> None:
    """Passes without labels, of whole rows, of the head alone and of `generate` are stock."""
    stock, model = tiny_model(), tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    ids, positions = batch["input_ids"], batch["position_ids"]
    unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
    wanted = stock(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model(**unlabelled).logits, wanted)
    assert torch.equal(model(**unlabelled, logits_to_keep=2).logits, wanted[:, -2:])
    hidden = torch.randn(2, 3, 64)
    assert torch.equal(model.lm_head(hidden), stock.lm_head(hidden))
    for each in (stock, model):
        each.eval()
    whole = {"input_ids": ids, "labels": ids}
    found, expected = model(**whole), stock(**whole)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    words = [
        each.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for each in (model, stock)
    ]
    assert torch.equal(*words)


def test_outputs_as_a_tuple() -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    asked = {"output_hidden_states": True, "use_cache": False}
    outputs, wanted = model(**batch, **asked, return_dict=False), model(**batch, **asked)
    loss, hidden_states = outputs
    assert torch.equal(loss, wanted.loss)
    assert len(hidden_states) == len(wanted.hidden_states) == 3


def test_a_failed_pass_leaves_nothing_open() -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)

    def fail(*_: Any) -> None:
        raise KeyError("in the last norm")

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(KeyError, match="in the last norm"):
        model(**batch)
    hook.remove()
    assert model.lm_head(torch.randn(2, 64)).shape == (2, VOCABULARY)
    assert model(**batch).loss.requires_grad


def test_a_forward_that_is_called_past_its_hooks_takes_full_logits() -> None:
    """Wrappers of other libraries may call `model.forward`, which skips hooks."""
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    wanted = model(**batch).loss
    for share in (1.0, 0.5):  # the second pass doesn't reuse the first one's count
        out = model.forward(**batch, num_valid_tokens=int((LENGTH - 1 + LENGTH - 8) / share))
        assert out.logits.shape == (*batch["labels"].shape, VOCABULARY)
        assert relative_error(out.loss, share * wanted) < TOLERANCE


@pytest.mark.parametrize("loss", ["chunked", "logits"])
def test_what_can_not_be_right(loss: LossName) -> None:
    """`logits_to_keep` with labels, labels outside the vocabulary, and a loss function that came
    after `patch` are refused."""
    model = tiny_model()
    batch: dict[str, Any] = collated(patch(model, LongContextConfig(loss=loss)))
    for kept, says in ((2, "logits_to_keep=2"), (torch.tensor([0, 1]), r"logits_to_keep=tensor")):
        with pytest.raises(ValueError, match=f"{says}.* with labels of a sharded batch"):
            model(**batch, logits_to_keep=kept)
    batch["labels"][0, 3] = batch["shift_labels"][0, 3] = -1
    with pytest.raises(ValueError, match=f"label -1: labels are from 0 to {VOCABULARY - 1}"):
        model(**batch)
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match=r"loss_function is <function .*token_log_probs\(batch\)"):
        model(**batch)


def test_logits_that_change_on_their_way_are_noticed() -> None:
    model: Any = tiny_model()
    handle = patch(model, LongContextConfig())

    def forward(self: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = 2 * self.lm_head(self.model(**kwargs).last_hidden_state)
        loss = self.loss_function(logits, labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model.forward = MethodType(forward, model)
    with pytest.raises(RuntimeError, match=r"something changes the logits .*loss='logits'"):
        model(**collated(handle))


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
