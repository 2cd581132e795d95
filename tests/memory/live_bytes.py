"""Meters for the CPU: one of bytes that a test counts, one of the storages that are alive."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Counts:
    """A `Meter` whose bytes the test counts itself."""

    capacity_bytes: int
    now: int = 0
    top: int = 0
    fill: float = 1.0
    tried_again: int = 0
    failed: int = 0

    def hold(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.top = max(self.top, self.now)

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.top

    def reset_peak(self) -> None:
        self.top = self.now

    def capacity(self) -> int:
        return self.capacity_bytes

    def fillable(self, rest_bytes: int) -> int:
        return rest_bytes + int(self.fill * (self.capacity_bytes - rest_bytes))

    def retries(self) -> int:
        return self.tried_again

    def failures(self) -> int:
        return self.failed


class LiveBytes(Counts, TorchDispatchMode):
    """Counts the bytes of all living storages that operations made since it was entered."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        TorchDispatchMode.__init__(self)
        Counts.__init__(self, capacity_bytes)
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and address not in self._known:
            self._known.add(address)
            self.hold(num_bytes)
            weakref.finalize(storage, self._free, address, num_bytes)

    def _free(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes
