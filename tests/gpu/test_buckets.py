"""DDP on a GPU, which moves its inputs there, settles its buckets."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longctx_patch.plugin.gradients import settle_buckets
from tests.harness import run_distributed

pytestmark = pytest.mark.gpu


def settle_and_step(rank: int) -> None:
    model = nn.Linear(331, 331).cuda()
    stock, hidden = copy.deepcopy(model), torch.randn(7, 331, device="cuda")
    ddp = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    settle_buckets(ddp)
    assert model.weight.grad is None
    assert torch.equal(model.weight, stock.weight)
    for each in (ddp, stock):
        each(hidden).square().mean().backward()
    assert ddp._has_rebuilt_buckets  # by the backward of zeros, as its first forward found
    torch.testing.assert_close(model.weight.grad, stock.weight.grad)


def test_a_step_after_settling_is_the_model_s_own() -> None:
    run_distributed(settle_and_step, 1, backend="nccl")
