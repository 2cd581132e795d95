"""Transport between virtual ranks: threads of one process, for tests and notebooks.

    config = LongContextConfig(ring_degree=4)
    outs = run_virtual_ranks(4, lambda ranks: attention(..., group=virtual_group(ranks, config)))

Every rank runs the same function in a thread of its own. Gradients work on the CPU, where autograd
runs in the calling thread. On CUDA all backward passes share one thread, so ranks that wait for
each other inside `backward` would hang; attention refuses that case.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from longctx_patch.transport.protocol import Counters, Message, Pending

T = TypeVar("T")
_Address = tuple[tuple[int, ...], int, int]
_CLOSED = object()
"""The last item of a closed mailbox."""


class Mailboxes:
    """Queues between virtual ranks; each subgroup has its own, as process groups do."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._boxes: dict[_Address, Queue[object]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def _box(self, address: _Address) -> "Queue[object]":
        with self._lock:
            if address not in self._boxes:
                self._boxes[address] = Queue()
                if self._is_closed:
                    self._boxes[address].put(_CLOSED)
            return self._boxes[address]

    def close(self) -> None:
        """Wake all ranks that wait, now or later, for something that was not sent."""
        with self._lock:
            self._is_closed = True
            for box in self._boxes.values():
                box.put(_CLOSED)

    def put(self, address: _Address, item: object) -> None:
        self._box(address).put(item)

    def take(self, address: _Address) -> object:
        ranks, source, destination = address
        waits = f"virtual rank {ranks[destination]} waited"
        try:
            item = self._box(address).get(timeout=self.timeout_s)
        except Empty:
            raise TimeoutError(f"{waits} {self.timeout_s} s for rank {ranks[source]}") from None
        if item is _CLOSED:
            self.put(address, item)  # for whoever waits next
            raise ConnectionAbortedError(f"{waits} for rank {ranks[source]} when a rank failed")
        return item


@dataclass
class _Receives:
    """Messages that have not been taken out of their mailboxes yet."""

    transport: "VirtualTransport"
    receives: Sequence[Message]

    def wait(self) -> None:
        for message in self.receives:
            arrived = self.transport.take(message.group_rank)
            assert isinstance(arrived, Tensor)
            message.tensor.copy_(arrived)


@dataclass
class VirtualTransport:
    """One virtual rank's end of a group; `ranks` are the members among all virtual ranks."""

    mailboxes: Mailboxes
    ranks: tuple[int, ...]
    group_rank: int
    counters: Counters = field(default_factory=Counters)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def subgroup(self, group_ranks: Sequence[int]) -> "VirtualTransport":
        """This rank's end of a smaller group that it is a member of; counters are shared."""
        members = tuple(self.ranks[rank] for rank in group_ranks)
        mine = members.index(self.ranks[self.group_rank])
        return VirtualTransport(self.mailboxes, members, mine, self.counters)

    def put(self, group_rank: int, item: object) -> None:
        self.mailboxes.put((self.ranks, self.group_rank, group_rank), item)

    def take(self, group_rank: int) -> object:
        return self.mailboxes.take((self.ranks, group_rank, self.group_rank))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in sends:
            self.counters.sent(message.tensor.nbytes)
            self.put(message.group_rank, message.tensor.clone())
        return _Receives(self, receives)

    def all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive: Tensor,
        receive_sizes: Sequence[int],
    ) -> Pending:
        self.counters.sent_to_others(send_sizes, self.group_rank)
        for rank, part in enumerate(send.split(list(send_sizes))):
            self.put(rank, part.clone())
        parts = receive.split(list(receive_sizes))
        return _Receives(self, [Message(rank, part) for rank, part in enumerate(parts)])

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        for rank in range(self.num_ranks):
            self.put(rank, tuple(numbers))
        rows = [self.take(rank) for rank in range(self.num_ranks)]
        return [row for row in rows if isinstance(row, tuple)]

    def all_gather(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        for rank in range(self.num_ranks):
            self.put(rank, mine.clone())
        everyone = [self.take(rank) for rank in range(self.num_ranks)]
        return [tensor for tensor in everyone if isinstance(tensor, Tensor)]


def run_virtual_ranks(
    num_ranks: int, function: Callable[[VirtualTransport], T], *, timeout_s: float = 60.0
) -> list[T]:
    """Run `function(transport)` on every virtual rank; return the results by rank.

    Raises RuntimeError from the first error of any rank; the others end when they next wait for a
    rank. `timeout_s` is the longest that one waits for another.
    """
    mailboxes = Mailboxes(timeout_s)
    ranks = tuple(range(num_ranks))
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    grad_enabled = torch.is_grad_enabled()

    def run(group_rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[group_rank] = function(VirtualTransport(mailboxes, ranks, group_rank))
        except BaseException as error:
            errors.append((group_rank, error))
            mailboxes.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        group_rank, error = errors[0]
        raise RuntimeError(f"virtual rank {group_rank} failed: {error}") from error
    return [results[rank] for rank in ranks]
