"""MLPs in tiles on CUDA, where backward runs in a thread of its own."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from longctx_patch.memory.meter import total_bytes
from longctx_patch.memory.policies import CheckpointPolicy
from tests.hf.tiny import gradients, tiny_model
from tests.memory.trained import Trained
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTH = 301


def outcome(
    num_tiles: int | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    policy: CheckpointPolicy = "attention",
    autocast: bool = False,
) -> tuple[Tensor, Tensor]:
    """(loss, all gradients in one tensor); weights are rounded to bfloat16 for every dtype."""
    narrow = tiny_model(dtype=torch.bfloat16)
    model: Any = tiny_model(dtype=dtype)
    model.load_state_dict(narrow.state_dict())
    it = Trained(model.to(DEVICE), length=LENGTH, checkpoint=policy, mlp_tiles=num_tiles)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        loss = it.loss()
    loss.backward()
    assert it.handle.mlp_tiles == (num_tiles or 1,) * 2
    return loss.detach(), torch.cat([grad.flatten() for grad in gradients(model).values()])


@pytest.mark.parametrize(
    ("policy", "autocast"),
    [("none", True), ("full", False), ("attention", True), ("offload", False), ("auto", True)],
)
def test_tiles_are_as_accurate_as_whole_mlps(policy: CheckpointPolicy, autocast: bool) -> None:
    loss, grads = outcome(1, torch.float64)
    dtype = torch.float32 if autocast else torch.bfloat16
    whole_loss, whole = outcome(1, dtype, autocast=autocast)
    tiled_loss, tiled = outcome(5, dtype, policy=policy, autocast=autocast)
    assert relative_error(tiled, grads) <= 2 * relative_error(whole, grads)
    # One number may be right by luck, so the bound is never below 1e-3.
    assert relative_error(tiled_loss, loss) <= max(2 * relative_error(whole_loss, loss), 1e-3)


def test_a_short_row_needs_no_tiles() -> None:
    assert all(torch.equal(a, b) for a, b in zip(outcome(None), outcome(1), strict=True))
    total = torch.cuda.mem_get_info(0)[1]
    assert total_bytes(torch.device(DEVICE, 0)) == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("policy", ["none", "attention"])
def test_dropout_of_adapters_has_the_gradient_of_its_loss(policy: CheckpointPolicy) -> None:
    """The gradient equals a difference of losses under the same random numbers from CUDA."""
    torch.manual_seed(1)
    options = LoraConfig(
        r=2, target_modules=["gate_proj"], init_lora_weights=False, lora_dropout=0.4
    )
    model: Any = get_peft_model(tiny_model(dtype=torch.float64), options)
    for parameter in model.parameters():  # but not the buffers of rotary embeddings
        parameter.data = parameter.data.double()
    it = Trained(model.to(DEVICE).train(), length=LENGTH, checkpoint=policy, mlp_tiles=4)
    weight = next(p for name, p in model.named_parameters() if "lora_B" in name)

    def loss(step: Tensor) -> Tensor:
        torch.manual_seed(3)
        with torch.no_grad():
            weight.add_(step)
        return it.loss()

    zero = torch.zeros_like(weight)
    loss(zero).backward()
    grad = weight.grad.clone()
    step = 1e-5 * grad / grad.norm()
    difference = (loss(step) - loss(-2 * step)).detach() / 2e-5
    assert relative_error(difference, grad.norm()) < 1e-5
