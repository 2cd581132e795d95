"""Several tensors in one flat byte buffer, so that each hop is one message.

One message per hop also keeps the order unambiguous: with two ranks the previous and the next
neighbour are the same process, and messages between two processes match by order alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packet:
    """A byte buffer and the tensors that are views of it."""

    buffer: Tensor
    """uint8 `[num_bytes]`, contiguous."""
    tensors: tuple[Tensor, ...]

    @classmethod
    def empty(cls, specs: Sequence[TensorSpec], device: torch.device) -> "Packet":
        """Uninitialised memory for tensors of these shapes; widest dtype first, so views align."""
        sizes = [spec.num_bytes for spec in specs]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        widths = [spec.dtype.itemsize for spec in specs]
        assert widths == sorted(widths, reverse=True), "views align only with the widest first"
        parts = zip(buffer.split(sizes), specs, strict=True)
        views = [part.view(spec.dtype).view(spec.shape) for part, spec in parts]
        return cls(buffer, tuple(views))

    @classmethod
    def pack(cls, tensors: Sequence[Tensor]) -> "Packet":
        """Copy tensors into a new packet."""
        specs = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        packet = cls.empty(specs, tensors[0].device)
        for view, tensor in zip(packet.tensors, tensors, strict=True):
            view.copy_(tensor)
        return packet
