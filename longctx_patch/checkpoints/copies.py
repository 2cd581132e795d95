"""Copies of a training's tensors on the host, which are written while it goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_leaves

from longctx_patch.health.own_part import own_part


def bytes_here(tensors: Any) -> int:
    """What a copy of this rank's parts of all tensors in lists and dicts takes."""
    return sum(own_part(leaf).nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


class Copier:
    """Copies tensors to the host, always into the same memory: one copy at a time is kept.

    On a GPU that memory is pinned, so that copying runs at the speed of the bus.
    """

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"
        self.bytes_held = 0
        """What the memory takes, from the first copy on."""
        # Not its public wrapper, which in torch 2.11 closes it after one copy.
        self._stager = StateDictStager(pin_memory=self._on_gpu)

    def copy(self, tensors: Any) -> Any:
        """The same lists and dicts of tensors on the host; what was copied before is overwritten.
        Tensors that share memory do so in the copy."""
        copies: Any = self._stager.stage(tensors, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()
        self.bytes_held = max(self.bytes_held, bytes_here(tensors))
        return copies
