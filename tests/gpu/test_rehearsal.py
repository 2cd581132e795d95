"""`auto` begins with what a rehearsal found, on GPU memory that the test limits."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.memory.ladder import LADDER
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.policies import CheckpointPolicy, LayerPolicy
from tests.hf import trained
from tests.hf.tiny import tiny_model

pytestmark = pytest.mark.gpu

DEVICE, LAYERS, LENGTH = torch.device("cuda", 0), 12, 2**14
STEPS = 4


@pytest.fixture(autouse=True)
def all_memory_again() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Run(trained.Run):
    def __init__(self, checkpoint: CheckpointPolicy) -> None:
        gc.collect()  # frees the models of earlier runs
        torch.cuda.empty_cache()
        model: Any = tiny_model(
            num_hidden_layers=LAYERS,
            hidden_size=1024,
            intermediate_size=2816,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            dtype=torch.bfloat16,
        )
        options: dict[str, Any] = {"checkpoint": checkpoint, "mlp_tiles": 1}
        super().__init__(None, model=model.to(DEVICE), length=LENGTH, rows=1, **options)

    @property
    def num_retries(self) -> int:
        """Retries of the allocator in this process so far."""
        return torch.cuda.memory_stats(DEVICE)["num_alloc_retries"]

    def steps(self) -> tuple[list[tuple[LayerPolicy, ...]], list[int], Tensor]:
        """(policies, peak bytes, losses) of the steps."""
        policies, peaks, losses = [], [], []
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            loss = self.loss()
            loss.backward()
            losses.append(loss.detach())
            peaks.append(torch.cuda.max_memory_allocated())
            policies.append(self.handle.checkpointing.policies)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return policies, peaks, torch.stack(losses)


def capacity_of(run: Run, num_bytes: float) -> int:
    """Limit this process to `num_bytes` of the GPU; its capacity then, in bytes."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    meter = run.handle._checkpoints.find_meter(DEVICE)
    assert meter is not None
    return meter.capacity()


def test_layers_climb_from_the_first_pass_on() -> None:
    """More layers climb later where a pass takes less than expected, which is an upper bound."""
    least = Run("offload")
    expected = {"offload": least.rehearse().expected_bytes}
    plain = least.steps()
    del least
    whole = Run("none")
    expected["none"] = whole.rehearse().expected_bytes
    del whole
    assert expected["none"] > 1.5 * expected["offload"]
    for share in (0.1, 0.3, 0.7):
        run = Run("auto")
        wanted = (1 - share) * expected["offload"] + share * expected["none"]
        capacity = capacity_of(run, wanted / (1 - MARGIN))
        run.rehearse()
        known = run.handle.checkpointing.memory
        assert known is not None
        retries = run.num_retries
        policies, peaks, losses = run.steps()
        torch.cuda.set_per_process_memory_fraction(1.0)
        # No pass measures with a whole last layer as its sample: layers climb from step 1 on.
        rungs = [[LADDER.index(policy) for policy in of_step] for of_step in policies]
        assert all(sorted(of_step) == of_step for of_step in rungs)
        assert sum(rungs[0]) >= 1
        assert sum(rungs[-1]) >= sum(rungs[0]) or run.num_retries > retries + 1
        assert max(peaks) <= capacity
        if sum(rungs[-1]) > sum(rungs[0]):
            assert peaks[0] < (1 - MARGIN) * capacity - min(known.extra_bytes[0])
        # A rehearsal has the last layer whole, the others offloaded.
        bound = expected["offload"] + sum(known.extra_bytes[-1])
        assert expected["offload"] * 0.99 <= known.peak_bytes <= bound * 1.01
        assert torch.equal(losses[0], plain[2][0])
        # Kernels sum the gradients of queries in no fixed order.
        torch.testing.assert_close(losses, plain[2], rtol=1e-2, atol=0)
        del run


@pytest.mark.parametrize("checkpoint", ["none", "attention", "offload"])
def test_a_step_takes_what_was_expected(checkpoint: CheckpointPolicy) -> None:
    run = Run(checkpoint)
    expected = run.rehearse().expected_bytes
    _, peaks, _ = run.steps()
    assert peaks[-1] <= expected * 1.01
    assert expected <= peaks[-1] * 1.12
