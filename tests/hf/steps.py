"""A training step of one process or of all ranks together, and the comparison of two steps."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch import PatchHandle, SequenceShardCollator
from tests.hf.tiny import gradients
from tests.reference import relative_error

TOLERANCE = 1e-5
Rows = list[dict[str, list[int]]]


class Step(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    logits: Tensor | None = None
    """Of all tokens in the order of their rows; None where they were not made."""


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


def complaints(
    found: Step, wanted: Step, where: object, bounds: Mapping[str, float] = MappingProxyType({})
) -> list[str]:
    """How a step differs from the wanted one, in words; empty if it does not. `bounds`: errors that
    some gradients may have, beside `TOLERANCE`."""
    if found.grads.keys() != wanted.grads.keys():
        return [f"{where}: gradients of other parameters"]
    differs = errors(found, wanted)
    wrong = [name for name, error in differs.items() if not error < bounds.get(name, TOLERANCE)]
    return [f"{where}: {name} differs by {differs[name]:.1e}" for name in wrong[:3]]
