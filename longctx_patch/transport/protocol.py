"""The protocol between attention and transports. Only transports talk to torch.distributed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass
class Counters:
    """Running totals of what one rank has really sent and computed, which plans are compared with;
    shared by the transports and kernels of one patched model."""

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


class Message(NamedTuple):
    """A contiguous tensor to or from a rank of the group."""

    group_rank: int
    tensor: Tensor


class Pending(Protocol):
    """Messages on their way. Their tensors must not be touched before `wait` returns."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """One rank's end of a group."""

    group_rank: int
    counters: Counters

    @property
    def num_ranks(self) -> int: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post point-to-point messages; those between two ranks match in order."""
        ...

    def all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive: Tensor,
        receive_sizes: Sequence[int],
    ) -> Pending:
        """Send part `i` of `send` to rank `i` and fill part `i` of `receive` from it.

        Both are one-dimensional uint8; sizes are in bytes, may differ and may be zero. A rank's
        own part is copied. Once waited for, `receive` may be read on the current stream; what is
        posted first is waited for first.
        """
        ...

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers, by rank; all give equally many. Control messages aren't counted."""
        ...

    def all_gather(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's tensor, by rank; its own may be `mine` itself.

        Along dim 0 rank `i` has `sizes[i]`, which may be zero; other dims and the dtype are alike.
        Not counted, because the plans that counters are compared with don't contain it.
        """
        ...


class Done:
    """Pending with nothing to wait for."""

    def wait(self) -> None:
        return


@dataclass
class SoloTransport:
    """A group of one."""

    counters: Counters = field(default_factory=Counters)
    group_rank: int = 0
    num_ranks: int = 1

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        assert not [*sends, *receives], "a rank that is alone has nobody to talk to"
        return Done()

    def all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive: Tensor,
        receive_sizes: Sequence[int],
    ) -> Pending:
        receive.copy_(send)
        return Done()

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(numbers)]

    def all_gather(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [mine]
