"""Keep layers' tensors for backward on the host: copied out during forward, and back in time.

A layer's tensors are copied out on a separate stream as soon as they exist. When the layer's
forward is over, the device waits for these copies; in wide models they are done by then, since the
MLP takes longer. So their memory is free for the next layer however far the host is ahead of the
device. Without that wait, the tensors of many layers would stay until the host sees that their
copies are done. In backward, the first request for one of a layer's tensors brings back all of
them, and those of the layer before it, which backward needs next: they travel while this layer is
computed.

Host memory is pinned, and later passes use it again. More is taken only while `RESERVE` of the
machine's memory stays free, which all processes of the machine share.

Where a layer's tensors are larger than `AHEAD`, they come back only when they are asked for. The
wait matters little, since a layer of such long rows takes a minute to compute, and the memory saved
makes longer rows possible.

On CPU the copies are made too, synchronously, though they save nothing there.
"""

import math
import os
import warnings
import weakref
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.memory import host
from longctx_patch.memory.limits import AHEAD, RESERVE
from longctx_patch.memory.meter import total_bytes
from longctx_patch.memory.replay import Getter

Place = tuple[int, torch.dtype, int]
"""A tensor's place in its layer: its dimensions, dtype and number among those that are alike in
these. A layer's input, attention's results, and what came of other ranks differ in them."""


class HostMemoryFull(RuntimeError):
    """Raised where the host has no room for what a layer keeps."""


class HostRoom(NamedTuple):
    """Bytes of host memory that are available, and how many of them have to stay free."""

    available: int
    reserve: int

    @classmethod
    def now(cls) -> "HostRoom":
        return cls(host.available_bytes(), int(RESERVE * host.total_bytes()))


class HostCopies:
    """The tensors that the layers of one process and device keep on the host."""

    def __init__(
        self,
        device: torch.device,
        *,
        must_leave: bool = True,
        num_layers: int = 1,
        pinned: bool = True,
    ) -> None:
        """A tensor that finds no room on the host stays on the device, with a warning.

        With `must_leave`, HostMemoryFull is raised instead: already after the first of
        `num_layers` layers, if what all of them would keep has no room. Memory that is used once
        need not be `pinned`, which takes longer than a copy gains by it.
        """
        self.device = device
        self._num_layers = num_layers
        self._pinned = pinned and device.type == "cuda"
        self._is_checked = False
        self.room = HostRoom.now
        total = total_bytes(device)
        self.most_ahead = math.inf if total is None else AHEAD * total
        """The most bytes of a layer that come back while the layer after it is in backward."""
        self.num_bytes = 0
        """Bytes of host memory that are held."""
        self.reserved_bytes = 0
        """Bytes that this process will take for other things."""
        self._must_leave = must_leave
        self._out, self._in = _Lane(device), _Lane(device)
        self._free: defaultdict[Place, list[_Slot]] = defaultdict(list)
        self._last: weakref.ref[Kept] | None = None
        self.is_full = False
        """True once a tensor found no room."""

    @property
    def bytes_with_room(self) -> int:
        """Bytes that each process of the machine may still take."""
        room = self._room()
        return max(0, room.available - room.reserve) // _num_local_processes()

    def begin(self) -> "Kept":
        """Begin with the next layer. Backward asks for layers in the opposite order."""
        if self._must_leave and self.num_bytes and not self._is_checked:
            self._is_checked = True
            self._check_all_layers()
        kept = Kept(self, self._last)
        self._last = weakref.ref(kept)
        return kept

    def take_out(self, tensor: Tensor, place: Place) -> "_OnHost | None":
        """Copy a tensor to the host; None if it has no room there.

        Tensors of one place are alike in size, but for the length of their row.
        """
        slot = self._slot(tensor.nbytes, place)
        if slot is None:
            return None
        held = _OnHost(self, slot, tensor)
        self._out.copy(held.on_host, tensor, slot)
        weakref.finalize(held, self._free[place].append, slot)
        return held

    def bring_back(self, held: "_OnHost") -> Tensor:
        """Begin to copy a tensor back; `_OnHost.get` waits for the copy."""
        back = torch.empty(held.on_host.shape, dtype=held.on_host.dtype, device=self.device)
        self._in.copy(back, held.on_host, held.slot)
        return back

    def _slot(self, num_bytes: int, place: Place) -> "_Slot | None":
        if free := self._free[place]:
            slot = free.pop()
            if slot.memory.nbytes >= num_bytes:
                return slot
            self.num_bytes -= slot.memory.nbytes  # of a shorter row, so it is replaced
            del slot
        if not self._has_room(num_bytes):
            return None
        self.num_bytes += num_bytes
        return _Slot(num_bytes, pinned=self._pinned)

    def _check_all_layers(self) -> None:
        """Refuse unless all layers of all processes, each as large as the first, have room."""
        processes = _num_local_processes()
        more = self.num_bytes * (self._num_layers - 1) * processes
        room = self._room()
        if more > room.available - room.reserve:
            raise HostMemoryFull(self._refusal(more, room, processes))

    def _room(self) -> HostRoom:
        """The host's room, less what all processes of the machine will take for other things."""
        room = self.room()
        return room._replace(reserve=room.reserve + self.reserved_bytes * _num_local_processes())

    def _has_room(self, num_bytes: int) -> bool:
        room = self._room()
        if num_bytes <= room.available - room.reserve:
            return True
        if self._must_leave:
            raise HostMemoryFull(self._refusal(num_bytes, room, 1))
        if not self.is_full:
            self.is_full = True
            warnings.warn(
                f"checkpoint='auto': the host has {_gib(room.available)} left, so no more is "
                f"offloaded than {_gib(self.num_bytes)}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return False

    def _refusal(self, num_bytes: int, room: HostRoom, processes: int) -> str:
        of = f" of {processes} processes" if processes > 1 else ""
        return (
            f"checkpoint='offload': the layers{of} need {_gib(num_bytes)} of host memory more, "
            f"next to {_gib(self.num_bytes)} in use. The host has {_gib(room.available)} left, of "
            f"which {_gib(room.reserve)} must stay free. Share the sequence between more machines, "
            "start fewer processes on each, or use checkpoint='attention'."
        )


def _num_local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Kept:
    """The tensors that one layer keeps on the host."""

    def __init__(self, host: HostCopies, before: "weakref.ref[Kept] | None") -> None:
        self._host = host
        self._before = before
        self._held: list[_OnHost] = []
        self._num_kept: Counter[tuple[int, torch.dtype]] = Counter()
        self._was_asked_for = False

    def keep(self, tensor: Tensor) -> Getter:
        detached = tensor.detach()
        form = (tensor.ndim, tensor.dtype)
        place, self._num_kept[form] = (*form, self._num_kept[form]), self._num_kept[form] + 1
        held = self._host.take_out(detached, place) if detached.nbytes else None
        if held is None:
            return lambda: detached
        self._held.append(held)

        def get() -> Tensor:
            self._bring_back()
            before = None if self._before is None else self._before()
            if before is not None and before._num_bytes <= self._host.most_ahead:
                before._bring_back()
            return held.get()

        return get

    def leave(self) -> None:
        """Free the device's memory for the next layer, once this one's forward is over."""
        for held in self._held:
            held.leave()

    @property
    def _num_bytes(self) -> int:
        return sum(held.on_host.nbytes for held in self._held)

    def _bring_back(self) -> None:
        """Bring all tensors back, once. In a second backward each comes back when asked for."""
        if not self._was_asked_for:
            self._was_asked_for = True
            for held in self._held:
                held.bring_back()


class _Slot:
    """Host memory, and the last copy from or to it.

    The memory is pinned through CUDA, because torch's pinned memory comes in powers of two and is
    never given back.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.memory.zero_()  # creates its pages on all cores; pinning or a copy would do so on one
        self.last_copy = _LastCopy()
        if pinned:
            address = self.memory.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            weakref.finalize(self.memory, _unpin, address, self.last_copy).atexit = False


class _LastCopy:
    event: torch.cuda.Event | None = None


def _unpin(address: int, last_copy: _LastCopy) -> None:
    if last_copy.event is not None:
        last_copy.event.synchronize()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class _OnHost:
    """One tensor on the host. Its slot is free again once this object is gone.

    The device tensor that a copy reads or writes is held here until `_wait`, so that torch gives
    its memory to no other work on that stream before the copy is done.
    """

    def __init__(self, host: HostCopies, slot: _Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.on_host = slot.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._host = host
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._leaving: Tensor | None = tensor
        self._back: Tensor | None = None

    def leave(self) -> None:
        if self._leaving is not None:
            self._wait()
            self._leaving = None

    def bring_back(self) -> None:
        self.leave()
        if self._back is None:
            with torch.cuda.stream(self._stream):  # the graph's stream, whoever asks
                self._back = self._host.bring_back(self)

    def get(self) -> Tensor:
        """The tensor on the device, ready for the layer's stream. It is no longer held here, so
        that it can be freed."""
        self.bring_back()
        self._wait()
        back, self._back = self._back, None
        assert back is not None
        return back

    def _wait(self) -> None:
        if self._stream is not None and self.slot.last_copy.event is not None:
            self._stream.wait_event(self.slot.last_copy.event)

    def __del__(self) -> None:
        if self._leaving is not None or self._back is not None:  # its graph was dropped
            self._wait()


class _Lane:
    """A stream for copies in one direction. On CPU they are done when `copy` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, to: Tensor, source: Tensor, slot: _Slot) -> None:
        """Copy after what the current stream has done so far, and after the slot's last copy."""
        if self._stream is None:
            to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if slot.last_copy.event is not None:
            self._stream.wait_event(slot.last_copy.event)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        slot.last_copy.event = self._stream.record_event()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
