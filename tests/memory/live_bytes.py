"""A meter for the CPU: bytes of all storages that operations have made and that are still alive."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; a `Meter` with a capacity of its own choice."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.fill = 1.0
        self._now = self._peak = 0
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
            self._now += num_bytes
            self._peak = max(self._peak, self._now)
            weakref.finalize(storage, self._free, address, num_bytes)

    def _free(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self._now -= num_bytes

    def allocated(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._now

    def capacity(self) -> int:
        return self.capacity_bytes

    def fillable(self, rest_bytes: int) -> int:
        return rest_bytes + int(self.fill * (self.capacity_bytes - rest_bytes))

    def retries(self) -> int:
        return 0

    def failures(self) -> int:
        return 0
