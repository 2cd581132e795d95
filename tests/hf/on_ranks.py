"""A step of virtual ranks: the mean loss and gradients of copies of one model, as trainers reduce
them, and the logits of its rows."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, patch, run_virtual_ranks, virtual_group
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import VirtualTransport
from tests.hf.steps import Step
from tests.hf.tiny import gradients


def nothing(handle: PatchHandle) -> None:
    """No further check of a patched model."""


def step_of_ranks(
    model: Any,
    config: LongContextConfig,
    batch: dict[str, Tensor],
    check: Callable[[PatchHandle], None] = nothing,
) -> Step:
    """Each rank gets the whole batch, and has sent what its plans say, to the byte. `check` is
    called on each after its step. The model itself stays as it was."""
    copies = [copy.deepcopy(model) for _ in range(config.sequence_degree)]

    def on_one_rank(transport: VirtualTransport) -> Step:
        model = copies[transport.group_rank]
        handle = patch(model, config, group=virtual_group(transport, config))
        out = model(**batch)
        logits = out.logits.detach() if config.loss == "logits" else None
        out.loss.backward()
        first, sent = handle.first_step, handle.counters
        if config.sequence_degree > 1:
            assert first is not None  # which has compared forward with its plans
            assert first.backward_problem() is None
            planned = first.planned_forward() + first.planned_backward()
            assert planned == Traffic(sent.messages, sent.bytes)
        check(handle)
        handle.unpatch()
        return Step(out.loss.detach(), gradients(model), logits)

    steps = run_virtual_ranks(config.sequence_degree, on_one_rank)
    assert all(step.grads.keys() == steps[0].grads.keys() for step in steps)
    assert all(equal(step.logits, steps[0].logits) for step in steps)
    grads = {
        name: torch.stack([step.grads[name] for step in steps]).mean(0) for name in steps[0].grads
    }
    return Step(torch.stack([step.loss for step in steps]).mean(), grads, steps[0].logits)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
