"""Counts of what was really sent and computed, to compare with a plan's prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Running totals of one rank; shared by the transports and kernels of one patched model."""

    messages: int = 0
    bytes: int = 0
    kernel_calls: int = 0
    _messages_before: int = field(default=0, repr=False)
    _bytes_before: int = field(default=0, repr=False)

    def sent(self, num_bytes: int) -> None:
        self.messages += 1
        self.bytes += num_bytes

    def sent_to_others(self, sizes_bytes: Sequence[int], group_rank: int) -> None:
        """Count an all-to-all: one message for each other rank that gets anything."""
        for rank, size in enumerate(sizes_bytes):
            if rank != group_rank and size:
                self.sent(size)

    def sent_ever(self) -> tuple[int, int]:
        """(messages, bytes) since the beginning, including what `reset` cleared."""
        return self._messages_before + self.messages, self._bytes_before + self.bytes

    def reset(self) -> None:
        self._messages_before, self._bytes_before = self.sent_ever()
        self.messages = self.bytes = self.kernel_calls = 0
