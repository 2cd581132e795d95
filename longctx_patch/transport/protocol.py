"""The protocol between attention and transports. Only transports talk to torch.distributed."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from longctx_patch.transport.counters import Counters


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
