"""What layers keep for backward, on the host: copied out while forward goes on, and back in time.

A layer's tensors leave on a stream of their own as soon as they are there, and their memory on the
device is free once they are gone. In backward, the first of a layer's tensors that is asked for
brings the others back too, and those of the layer before it, which is the next to be asked for:
they travel while this layer is computed. Host memory is pinned and used again by later passes.

On CPU the copies are made all the same, at once; they save nothing there.
"""

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from longctx_patch.replay import Getter


class HostCopies:
    """Of one process and device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = _Lane(device), _Lane(device)
        self._free: defaultdict[int, list[_Slot]] = defaultdict(list)
        self._last: weakref.ref[Kept] | None = None
        self.num_bytes = 0
        """Of host memory that was ever needed at once."""

    def begin(self) -> "Kept":
        """What the next layer keeps. In backward, layers are asked for in the opposite order."""
        kept = Kept(self, self._last)
        self._last = weakref.ref(kept)
        return kept

    def take_out(self, tensor: Tensor) -> "_OnHost":
        slot = self._slot(tensor.nbytes)
        held = _OnHost(self, slot, tensor)
        self._out.copy(held.on_host, tensor, slot)
        if tensor.is_cuda:  # freed before it has left, its memory isn't used again too early
            tensor.record_stream(self._out.stream)
        weakref.finalize(held, self._free[tensor.nbytes].append, slot)
        return held

    def bring_back(self, held: "_OnHost") -> Tensor:
        """Begin; `_OnHost.get` waits for it."""
        back = torch.empty(held.on_host.shape, dtype=held.on_host.dtype, device=self.device)
        self._in.copy(back, held.on_host, held.slot)
        if back.is_cuda:  # it may be given up before it has come
            back.record_stream(self._in.stream)
        return back

    def _slot(self, num_bytes: int) -> "_Slot":
        free = self._free[num_bytes]
        if free:
            return free.pop()
        self.num_bytes += num_bytes
        pinned = self.device.type == "cuda"
        return _Slot(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))


class Kept:
    """The tensors that one layer keeps on the host."""

    def __init__(self, host: HostCopies, before: "weakref.ref[Kept] | None") -> None:
        self._host = host
        self._before = before
        self._held: list[_OnHost] = []
        self._was_asked_for = False

    def keep(self, tensor: Tensor) -> Getter:
        held = self._host.take_out(tensor.detach())
        self._held.append(held)

        def get() -> Tensor:
            self._bring_back()
            before = None if self._before is None else self._before()
            if before is not None:
                before._bring_back()
            return held.get()

        return get

    def _bring_back(self) -> None:
        """All of them, once; what is asked for again, by a second backward, comes by itself."""
        if not self._was_asked_for:
            self._was_asked_for = True
            for held in self._held:
                held.bring_back()


class _Slot:
    """Host memory, and the last copy from or to it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: torch.cuda.Event | None = None


class _OnHost:
    """One tensor. Its slot is free again once nobody can ask for it any more."""

    def __init__(self, host: HostCopies, slot: _Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.on_host = slot.memory.view(tensor.dtype).view(tensor.shape)
        self._host = host
        self._back: Tensor | None = None

    def bring_back(self) -> None:
        if self._back is None:
            self._back = self._host.bring_back(self)

    def get(self) -> Tensor:
        """On the device, for the current stream; given up here, so that it can be freed."""
        self.bring_back()
        back, self._back = self._back, None
        assert back is not None
        if self.slot.copied is not None:
            torch.cuda.current_stream(back.device).wait_event(self.slot.copied)
        return back


class _Lane:
    """A stream for copies in one direction. On CPU they are done when `copy` returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def stream(self) -> torch.cuda.Stream:
        assert self._stream is not None
        return self._stream

    def copy(self, to: Tensor, source: Tensor, slot: _Slot) -> None:
        """After what the current stream has done so far, and after the slot's last copy."""
        if self._stream is None:
            to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if slot.copied is not None:
            self._stream.wait_event(slot.copied)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        slot.copied = self._stream.record_event()
