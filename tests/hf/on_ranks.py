"""Virtual ranks of one model: what each of them finds, and a step of all of them, as trainers
reduce it."""

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


def on_ranks(
    model: Any,
    config: LongContextConfig,
    run: Callable[[Any, PatchHandle], Any],
    **options: Any,
) -> list[Any]:
    """What `run(model, handle)` returns on each rank for a patched copy; `options` are patch's.
    The model itself stays as it was."""
    copies = [copy.deepcopy(model) for _ in range(config.sequence_degree)]

    def on_one_rank(transport: VirtualTransport) -> Any:
        mine, group = copies[transport.group_rank], virtual_group(transport, config)
        return run(mine, patch(mine, config, group=group, **options))

    return run_virtual_ranks(config.sequence_degree, on_one_rank)


def nothing(handle: PatchHandle) -> None:
    """No further check of a patched model."""


def step_of_ranks(
    model: Any,
    config: LongContextConfig,
    batch: dict[str, Tensor],
    check: Callable[[PatchHandle], None] = nothing,
    **options: Any,
) -> Step:
    """The mean gradients of all ranks, and the loss and logits that each of them has of the whole
    batch. Each has sent what its plans say, to the byte; `check` is called after its step."""

    def run(model: Any, handle: PatchHandle) -> Step:
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

    return reduced(on_ranks(model, config, run, **options))


def reduced(steps: list[Step]) -> Step:
    """The step of all ranks, each of which has the same loss and logits of whole rows."""
    first = steps[0]
    for step in steps:
        assert step.grads.keys() == first.grads.keys()
        assert torch.equal(step.loss, first.loss)
        assert equal(step.logits, first.logits)
    grads = {
        name: torch.stack([step.grads[name] for step in steps]).mean(0) for name in first.grads
    }
    return first._replace(grads=grads)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
