"""A training step of one process, of all ranks together or of virtual ranks, and the comparison of
two steps."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    SequenceShardCollator,
    patch,
    run_virtual_ranks,
    virtual_group,
)
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import VirtualTransport
from tests.hf.tiny import gradients
from tests.reference import relative_error

TOLERANCE = 1e-5
Rows = list[dict[str, list[int]]]


class Step(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    logits: Tensor | None = None
    """Those of all tokens in the order of their rows; None where they were not made."""


def errors(found: Step, wanted: Step) -> dict[str, float]:
    """By the names of the parameters; those of logits if both steps have them."""
    assert found.grads.keys() == wanted.grads.keys()
    of = {name: relative_error(found.grads[name], grad) for name, grad in wanted.grads.items()}
    of["loss"] = relative_error(found.loss, wanted.loss)
    if found.logits is not None and wanted.logits is not None:
        of["logits"] = relative_error(found.logits, wanted.logits)
    return of


def collated(handle: PatchHandle, rows: Rows, **options: Any) -> dict[str, Tensor]:
    """This rank's shard of the rows."""
    collate = SequenceShardCollator(
        handle.config, group_rank=handle.group_rank, pad_token_id=0, **options
    )
    return collate(rows)


def sharded_step(model: Any, batch: dict[str, Any]) -> Step:
    """The step of all ranks together: mean loss and gradients, the same on every rank."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return over_ranks(loss, model)


def over_ranks(loss: Tensor, model: Any) -> Step:
    """The mean loss and gradients over all ranks, reduced in one message."""
    grads = gradients(model)
    if not dist.is_initialized():
        return Step(loss.detach(), grads)
    flat = torch.cat([loss.detach().view(1), *(grad.flatten() for grad in grads.values())])
    dist.all_reduce(flat)
    total, *parts = (flat / dist.get_world_size()).split(
        [1, *(grad.numel() for grad in grads.values())]
    )
    shaped = {
        name: part.view_as(grad) for (name, grad), part in zip(grads.items(), parts, strict=True)
    }
    return Step(total[0], shaped)


def complaints(found: Step, wanted: Step, where: object, bound: float = TOLERANCE) -> list[str]:
    """How a step differs from the wanted one, in words; empty if it does not."""
    if found.grads.keys() != wanted.grads.keys():
        return [f"{where}: gradients of other parameters"]
    differs = errors(found, wanted)
    wrong = [name for name, error in differs.items() if not error < bound]
    return [f"{where}: {name} differs by {differs[name]:.1e}" for name in wrong[:3]]


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
