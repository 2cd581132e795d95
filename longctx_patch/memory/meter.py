"""Memory of a device as torch's allocator counts it, in bytes."""

from dataclasses import dataclass
from typing import Protocol

import torch

from longctx_patch.memory.allocator import segments_grow


class Meter(Protocol):
    """One process's view of one device."""

    def allocated(self) -> int:
        """Bytes that tensors hold now."""
        ...

    def peak(self) -> int:
        """The most bytes in use at once since the process began or the peak was reset: by tensors,
        or by freed tensors whose copies are still under way."""
        ...

    def reset_peak(self) -> None: ...

    def capacity(self) -> int:
        """Bytes that this process may allocate in all, given what others hold on the device."""
        ...

    def fillable(self, rest_bytes: int) -> int:
        """The part of the capacity that tensors of many sizes can be expected to fill, if tensors
        that stay hold `rest_bytes` of it."""
        ...

    def retries(self) -> int:
        """The number of times that the allocator found no memory, waited for the device, released
        its cache, and tried again."""
        ...

    def failures(self) -> int:
        """The number of times that it found no memory in this retry either, and raised an error."""
        ...


FIXED_SEGMENTS_FILL = 0.7
"""Share of the memory left by weights and optimizer states that other tensors can fill where
segments don't grow. Runs went out of memory when these held 0.72 of it."""


@dataclass(frozen=True)
class CudaMeter:
    """Reads what torch's CUDA allocator counts on the host, which waits for no kernel."""

    device: torch.device
    fill: float = 1.0
    """Share of the memory left by permanent tensors that temporary ones can fill."""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["active_bytes"]["all"]["peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def capacity(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        # What the allocator has reserved and no tensor holds is free too, for this process.
        mine = free + torch.cuda.memory_reserved(self.device)
        return min(mine, int(total * torch.cuda.get_per_process_memory_fraction(self.device)))

    def fillable(self, rest_bytes: int) -> int:
        return rest_bytes + int(self.fill * (self.capacity() - rest_bytes))

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["num_alloc_retries"])

    def failures(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["num_ooms"])


def meter_of(device: torch.device) -> Meter | None:
    """The meter of a device; None where torch does not count memory, as on CPU."""
    if device.type != "cuda":
        return None
    return CudaMeter(device, fill=1.0 if segments_grow() else FIXED_SEGMENTS_FILL)


def total_bytes(device: torch.device) -> int | None:
    """Memory of the device, whoever holds it; None where torch does not count memory."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
