"""Four ranks of DDP, one interrupted: the step after a resumption is the step of the whole run."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longctx_patch.plugin.gradients import settle_buckets
from tests.harness import run_distributed

WIDTH = 331
"""Odd, and three layers of it fill more than DDP's first bucket of 1 MiB."""


def wrapped(rank: int, settles: bool) -> tuple[nn.Module, DistributedDataParallel]:
    """A model whose layers run in another order than they are registered in."""
    torch.manual_seed(0)
    model = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in (2, 0, 3, 1)})
    scale = nn.Parameter(torch.ones(WIDTH))
    model.register_parameter("scale", scale)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for number in range(4):
            x = torch.tanh(model[str(number)](x))
        found: torch.Tensor = (x * scale).square().mean()
        return found

    model.register_buffer("offset", torch.zeros(3))
    model.forward = forward
    ddp = DistributedDataParallel(model)
    if settles:
        state = torch.get_rng_state()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        settle_buckets(ddp)
        assert ddp.module is model
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(before[n], weight) for n, weight in model.state_dict().items())
    return model, ddp


def step(ddp: DistributedDataParallel, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    ddp(torch.randn(7, WIDTH, generator=generator)).backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.sub_(10 * parameter.grad)
            parameter.grad = None


def go_on(rank: int, settles: bool) -> bool:
    """Whether three steps after a resumption equal those of the whole run to the last bit."""
    model, whole = wrapped(rank, settles)
    for number in range(2):
        step(whole, rank, number)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    for number in (2, 3):
        step(whole, rank, number)
    again, resumed = wrapped(rank, settles)
    again.load_state_dict(kept)
    for number in (2, 3):
        step(resumed, rank, number)
    return all(torch.equal(model.state_dict()[n], w) for n, w in again.state_dict().items())


def test_models_without_ddp_are_left_alone() -> None:
    settle_buckets(nn.Linear(2, 2))


def settle_as_on_a_gpu(rank: int) -> None:
    _, ddp = wrapped(rank, settles=False)
    ddp.device_ids = [0]  # which DDP has of a GPU, and moves what it is called with to
    settle_buckets(ddp)
    ddp.device_ids = None
    step(ddp, rank, 0)
    assert ddp._has_rebuilt_buckets  # by the backward of zeros, as its first forward found


def check(rank: int) -> tuple[bool, bool]:
    settle_as_on_a_gpu(rank)
    return go_on(rank, True), go_on(rank, False)


def test_a_resumed_step_adds_in_the_order_of_the_whole_run() -> None:
    """Without settling it does not: so it notices buckets that nobody settles."""
    assert run_distributed(check, 4) == [(True, False)] * 4
