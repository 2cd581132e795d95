"""Transport of a rank that is alone: nothing to send."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from longctx_patch.transport.counters import Counters
from longctx_patch.transport.protocol import Done, Message, Pending


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
