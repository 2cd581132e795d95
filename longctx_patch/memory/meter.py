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
        """The most bytes that were taken at once since the process began or someone reset the peak:
        by tensors, or by copies under way of tensors that are gone."""
        ...

    def reset_peak(self) -> None: ...

    def capacity(self) -> int:
        """Bytes that this process may allocate in all, beside what others hold on the device."""
        ...

    def fillable(self, rest_bytes: int) -> int:
        """The part of the capacity that tensors of many sizes can be expected to fill, if tensors
        that stay hold `rest_bytes` of it."""
        ...

    def retries(self) -> int:
        """How often the allocator found no memory so far, waited for the device, gave back all that
        it kept for later, and tried again."""
        ...

    def failures(self) -> int:
        """How often it found no memory then either, and raised an error."""
        ...


FIXED_SEGMENTS_FILL = 0.7
"""Share that tensors can fill where segments don't grow. Runs were out of memory when tensors held
0.72 of what those that stay (weights and optimizer states) had left."""


@dataclass(frozen=True)
class CudaMeter:
    """What torch's CUDA allocator counts on the host, so that reading it waits for no kernel."""

    device: torch.device
    fill: float = 1.0
    """Share of the memory that tensors which stay leave, for tensors that come and go."""

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
