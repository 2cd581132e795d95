"""Memory of a device as torch's allocator counts it, in bytes."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Meter(Protocol):
    """One process's view of one device."""

    def allocated(self) -> int:
        """Held by tensors now."""
        ...

    def peak(self) -> int:
        """The most that was taken at once, since the process began or someone reset it: held by
        tensors, or by copies under way of tensors that are gone."""
        ...

    def reset_peak(self) -> None: ...

    def capacity(self) -> int:
        """What this process may allocate in all, next to what others hold on the device."""
        ...


@dataclass(frozen=True)
class CudaMeter:
    """Of torch's CUDA allocator. Reads counters of the host, so it waits for no kernel."""

    device: torch.device

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


def meter_of(device: torch.device) -> Meter | None:
    """None where torch does not count memory, as on CPU."""
    return CudaMeter(device) if device.type == "cuda" else None


def total_bytes(device: torch.device) -> int | None:
    """Memory of the device, whoever holds it; None where torch does not count memory."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
