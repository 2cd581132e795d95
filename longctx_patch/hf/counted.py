"""A count of tokens that a trainer gives, and whether that trainer knows of the sequence group."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor


def number_of(num_items: Any) -> float | None:
    """transformers' count of the step's tokens, as a number of this process.

    FSDP2 with mixed precision rounds tensors of floats that a model is given, so a count in half
    precision is no count.
    """
    if num_items is None:
        return None
    is_tensor = isinstance(num_items, Tensor)
    if is_tensor and num_items.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"num_items_in_batch is a tensor of {num_items.dtype}, which rounds a count of tokens: "
            "FSDP2's mixed precision casts it on the way. Pass int(num_items_in_batch)."
        )
    if is_tensor and num_items.numel() != 1:
        raise ValueError(
            f"num_items_in_batch {list(num_items.shape)}: it is one number, the tokens of the step "
            "over all processes. Use num_items_in_batch.sum()."
        )
    number = float(num_items)
    if not (number == 0 or number >= 1) or not isfinite(number):
        raise ValueError(f"num_items_in_batch={number:g}: it counts tokens, so it is 0, 1 or more.")
    return number


def require_known_group(num_items: Any, num_ranks: int, *, training: bool) -> None:
    """Raise ValueError where a trainer has counted the tokens that does not know of the group.

    A trainer gives its count as a tensor (`LongContextTrainerMixin` as a number), and scales the
    loss by the ranks that its Accelerator takes for replicas. In evaluation it also gathers the
    rows of each rank, which only the mixin does once per group.
    """
    if num_ranks == 1 or not isinstance(num_items, Tensor):
        return
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return  # no trainer without an Accelerator
    known = AcceleratorState._shared_state.get("parallelism_config")
    is_axis = known is not None and known.tp_size == num_ranks and not known.tp_enabled
    if is_axis and training:
        return
    why = "an evaluation by" if is_axis else "a patched model in"
    raise ValueError(
        f"{why} a trainer without LongContextTrainerMixin: the {num_ranks} ranks that share a "
        "sequence would count as replicas. Use LongContextTrainer, or class MyTrainer("
        "LongContextTrainerMixin, SFTTrainer). (num_items_in_batch is a tensor, as trainers give "
        "it; in a loop of your own, give a number.)"
    )
