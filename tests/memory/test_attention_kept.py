"""Layers that keep attention of some tokens only: their results, memory and traffic."""

from typing import Any

import pytest
import torch

from tests.hf.tiny import tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import Gradients, Trained, assert_equal, assert_near


def assert_close(found: Gradients, wanted: Gradients) -> None:
    """The loss to the bit, since forward is the same; gradients within float32's rounding."""
    assert torch.equal(found["loss"], wanted["loss"])
    assert_near(found, wanted)


@pytest.mark.parametrize(
    ("policy", "share"),
    [("attention", 0.5), ("attention", 0.8), ("offload", 0.0), ("offload", 0.5)],
)
def test_numbers_of_one_process(policy: Any, share: float) -> None:
    wanted = Trained(tiny_model(), checkpoint="none").step()
    it = Trained(tiny_model(), checkpoint=policy, attention_kept=share)
    for _ in range(2):
        assert_close(it.step(), wanted)


def test_a_share_of_nothing_is_full() -> None:
    wanted = Trained(tiny_model(), checkpoint="full").step()
    it = Trained(tiny_model(), checkpoint="attention", attention_kept=0)
    assert_equal(it.step(), wanted)


def test_memory_falls_with_the_share() -> None:
    """A share of 1 keeps out `[B, L, H, D]` and lse `[B, H, L]` in float32, 0.5 half of it."""
    peaks = {}
    for share in (1.0, 0.5, 0.0):
        with LiveBytes() as meter:
            it = Trained(
                tiny_model(num_hidden_layers=5), checkpoint="attention", attention_kept=share
            )
            it.step()
            loss = it.loss()
            peaks[share] = meter.allocated()
            del loss
    layers, batch, length, heads, dim = 5, 2, 48, 4, 16
    whole = layers * batch * length * heads * (dim + 1) * 4
    assert peaks[1.0] - peaks[0.0] == whole
    assert peaks[1.0] - peaks[0.5] == pytest.approx(whole / 2, rel=0.1)


def test_host_memory_falls_with_the_share() -> None:
    held = {}
    for share in (1.0, 0.5, 0.0):
        it = Trained(tiny_model(), checkpoint="offload", attention_kept=share)
        it.step()
        held[share] = it.handle.checkpointing.host_bytes
    layers, batch, length, hidden, heads, dim = 2, 2, 48, 64, 4, 16
    inputs = layers * batch * length * hidden * 4
    results = layers * batch * length * heads * (dim + 1) * 4
    assert held == {1.0: inputs + results, 0.5: inputs + results // 2, 0.0: inputs}
