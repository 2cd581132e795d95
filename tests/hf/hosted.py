"""The CPU stands in for a GPU with a host: offloaded bytes count as the host's."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.memory import offload
from longctx_patch.memory.offload import HostRoom
from tests.memory.live_bytes import LiveBytes


class Host:
    """Host memory that layers may offload to."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0
        self.addresses: set[int] = set()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make_slot = offload._Slot.__init__

        def made(slot: Any, num_bytes: int, *, pinned: bool) -> None:
            with _disable_current_modes():
                make_slot(slot, num_bytes, pinned=pinned)
            storage = slot.memory.untyped_storage()
            self.addresses.add(storage.data_ptr())
            self.taken_bytes += num_bytes
            weakref.finalize(storage, self._free, storage.data_ptr(), num_bytes)

        monkeypatch.setattr(offload._Slot, "__init__", made)
        monkeypatch.setattr(
            HostRoom, "now", lambda: HostRoom(self.total_bytes - self.taken_bytes, 0)
        )
        monkeypatch.setattr(LayerCheckpoints, "_lowest", lambda *_: "offload")

    def _free(self, address: int, num_bytes: int) -> None:
        self.addresses.discard(address)
        self.taken_bytes -= num_bytes


class DeviceBytes(LiveBytes):
    """A meter of all live bytes except those on the host."""

    def __init__(self, host: Host, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._host = host

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self._host.addresses:
            super()._note(storage)
