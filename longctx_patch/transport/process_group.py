"""Transport over a torch.distributed process group (NCCL or gloo)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.transport.protocol import Counters, Done, Message, Pending


class _Requests:
    """Works in flight, with the tensors they use kept alive until they are done."""

    def __init__(self, works: list[dist.Work], keep: list[Tensor]) -> None:
        self._works = works
        self._keep = keep

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._keep.clear()


class ProcessGroupTransport:
    """The calling process's end of `group`; `device` is where control numbers travel."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, counters: Counters | None = None
    ) -> None:
        self.group = group
        self.group_rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.counters = counters if counters is not None else Counters()
        self._device = device
        if self.num_ranks > 1:
            self._warm_up()

    def _warm_up(self) -> None:
        """Create the communicator with a collective: a first point-to-point batch that only some
        ranks take part in would otherwise wait for the others."""
        dist.all_reduce(torch.zeros(1, device=self._device), group=self.group)

    def close(self) -> None:
        """Destroy the group, unless the whole job's groups are gone already."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        operations = [self._operation(dist.isend, message) for message in sends]
        operations += [self._operation(dist.irecv, message) for message in receives]
        if not operations:
            return Done()
        for message in sends:
            self.counters.sent(message.tensor.nbytes)
        tensors = [message.tensor for message in (*sends, *receives)]
        return _Requests(dist.batch_isend_irecv(operations), tensors)

    def _operation(self, kind: Callable[..., Any], message: Message) -> dist.P2POp:
        return dist.P2POp(kind, message.tensor, group=self.group, group_peer=message.group_rank)

    def all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive: Tensor,
        receive_sizes: Sequence[int],
    ) -> Pending:
        self.counters.sent_to_others(send_sizes, self.group_rank)
        sizes = list(receive_sizes), list(send_sizes)
        work = dist.all_to_all_single(receive, send, *sizes, group=self.group, async_op=True)
        return _Requests([work], [send, receive])

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        return [tuple(row) for row in torch.stack(everyone).tolist()]

    def all_gather(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        # Padded to equal sizes, because gloo takes no others.
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])
        padded[: len(mine)] = mine
        everyone = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, padded, group=self.group)
        return [tensor[:size] for tensor, size in zip(everyone, sizes, strict=True)]
