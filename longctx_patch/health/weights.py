"""Refuses weights that are not finite before anything is trained from them, or saved."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longctx_patch.rules.together import own_rank, refuse_together


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part, without a copy. Detached, since checkpointing counts what is saved for
    backward."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def check_weights(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError on all ranks if a weight of one of them is not finite. Collective.

    Each rank reads what it holds once, on `device`, at the speed of its memory: 16 GB in some 10 ms
    on a GPU of 2 TB/s. Weights that lie on the host are copied there one by one, at the speed of
    the bus. Weights of less than 16 bits are left out.
    """
    _refuse(
        model,
        device,
        "before the first step. The file that it was loaded from is damaged or was saved by a run "
        "that had diverged: load another one, or write it anew.",
    )


def check_saved_weights(
    model: nn.Module, device: torch.device, step: int, *, together: bool = True
) -> None:
    """Raise ValueError on all ranks if a weight of one of them is not finite: then nothing is
    saved. Collective; costs what `check_weights` does. A step with a finite loss and finite
    gradients may still leave such a weight, where its update overflows.

    Args:
        step: the last one that was done.
        together: False where one rank may call it alone, which then looks at what it has.
    """
    _refuse(
        model,
        device,
        f"after step {step}, so nothing of it is saved. The optimizer's update overflowed, or a "
        "device's memory failed: go on from the last checkpoint, with a lower learning rate if it "
        "happens again.",
        together,
    )


def _refuse(model: nn.Module, device: torch.device, when: str, together: bool = True) -> None:
    found = first_non_finite_weight(model, device)
    problems = [f"{found} on rank {own_rank()}, {when}"] if found else []
    if together:
        refuse_together(problems)
    elif problems:
        raise ValueError(problems[0])


def first_non_finite_weight(model: nn.Module, device: torch.device | None = None) -> str | None:
    """The first parameter or buffer of which this rank's part is not finite, in words.

    Reads the host's answer once, and, if there is such a weight, a second time.
    """
    named = [(name, own_part(tensor)) for name, tensor in _tensors(model)]
    held = [(name, part) for name, part in named if part.numel()]
    if not held:
        return None
    # The greatest absolute value, or NaN: one pass, without a copy.
    largest = [
        torch.linalg.vector_norm(part.to(device or part.device), math.inf) for _, part in held
    ]
    where = device or largest[0].device
    finite = torch.stack([torch.isfinite(value).to(where) for value in largest]).tolist()
    if all(finite):
        return None
    name, part = held[finite.index(False)]
    odd = int((~torch.isfinite(part)).sum())
    return f"weight {name.removeprefix('module.')} has {odd:,} values that are not finite"


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t) for name, t in found if t.is_floating_point() and t.dtype.itemsize >= 2]
