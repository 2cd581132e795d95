"""Transport between virtual ranks: threads of one process, for tests and notebooks.

    outs = run_virtual_ranks(4, lambda transport: attention(..., transport=transport))

Every rank runs the same function in a thread of its own. Gradients work on the CPU, where autograd
runs in the calling thread. On CUDA all backward passes share one thread, so ranks that wait for
each other inside `backward` would hang; that case is refused.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from longctx_patch.transport.base import Message, Pending
from longctx_patch.transport.counters import Counters

T = TypeVar("T")


class VirtualGroup:
    """Mailboxes between `num_ranks` virtual ranks."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._boxes: dict[tuple[int, int], Queue[object]] = {
            (source, destination): Queue()
            for source in range(num_ranks)
            for destination in range(num_ranks)
        }

    def put(self, source: int, destination: int, item: object) -> None:
        self._boxes[source, destination].put(item)

    def take(self, source: int, destination: int) -> object:
        try:
            return self._boxes[source, destination].get(timeout=self.timeout_s)
        except Empty:
            raise TimeoutError(
                f"virtual rank {destination} waited {self.timeout_s} s for rank {source}"
            ) from None


@dataclass
class _Receives:
    """Messages that have not been taken out of their mailboxes yet."""

    transport: "VirtualTransport"
    receives: Sequence[Message]

    def wait(self) -> None:
        for message in self.receives:
            arrived = self.transport.group.take(message.group_rank, self.transport.group_rank)
            assert isinstance(arrived, Tensor)
            message.tensor.copy_(arrived)


@dataclass
class VirtualTransport:
    """One virtual rank's end of the group."""

    group: VirtualGroup
    group_rank: int
    counters: Counters = field(default_factory=Counters)

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in sends:
            self.counters.sent(message.tensor.nbytes)
            self.group.put(self.group_rank, message.group_rank, message.tensor.clone())
        return _Receives(self, receives)

    def all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive: Tensor,
        receive_sizes: Sequence[int],
    ) -> None:
        self.counters.sent_to_others(send_sizes, self.group_rank)
        for rank, part in enumerate(send.split(list(send_sizes))):
            self.group.put(self.group_rank, rank, part.clone())
        parts = receive.split(list(receive_sizes))
        _Receives(self, [Message(rank, part) for rank, part in enumerate(parts)]).wait()

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        for rank in range(self.num_ranks):
            self.group.put(self.group_rank, rank, tuple(numbers))
        rows = [self.group.take(rank, self.group_rank) for rank in range(self.num_ranks)]
        return [row for row in rows if isinstance(row, tuple)]


def run_virtual_ranks(
    num_ranks: int, function: Callable[[VirtualTransport], T], *, timeout_s: float = 60.0
) -> list[T]:
    """Run `function(transport)` on every virtual rank; return the results by rank.

    The first rank that raises decides the error; the others are not waited for longer than
    `timeout_s`.
    """
    group = VirtualGroup(num_ranks, timeout_s)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    grad_enabled = torch.is_grad_enabled()

    def run(group_rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[group_rank] = function(VirtualTransport(group, group_rank))
        except BaseException as error:
            errors.append((group_rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        group_rank, error = errors[0]
        raise RuntimeError(f"virtual rank {group_rank} failed") from error
    return [results[rank] for rank in range(num_ranks)]
