import pytest
import torch
import torch.distributed as dist

from longctx_patch.transport import (
    Message,
    Packet,
    ProcessGroupTransport,
    SoloTransport,
    TensorSpec,
    Transport,
    VirtualTransport,
    run_virtual_ranks,
)
from tests.harness import run_distributed


def exercise(transport: Transport) -> None:
    """Check a ring exchange with two messages per link, all-to-alls, and gathers."""
    rank, num_ranks = transport.group_rank, transport.num_ranks
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    sends = [torch.full((4,), 10 * rank + i, dtype=torch.uint8) for i in range(2)]
    receives = [torch.empty(4, dtype=torch.uint8) for _ in range(2)]
    transport.exchange(
        [Message(after, x) for x in sends], [Message(before, x) for x in receives]
    ).wait()
    assert [x[0].item() for x in receives] == [10 * before, 10 * before + 1]

    others: list[int] = []
    for tokens, heads in (([3] * num_ranks, [2] * num_ranks), (range(num_ranks), range(1, 9))):
        send_sizes = [tokens[rank] * heads[to] for to in range(num_ranks)]
        receive_sizes = [tokens[source] * heads[rank] for source in range(num_ranks)]
        parts = [
            torch.full((n,), 10 * rank + to, dtype=torch.uint8) for to, n in enumerate(send_sizes)
        ]
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        transport.all_to_all(torch.cat(parts), send_sizes, received, receive_sizes).wait()
        wanted = [10 * source + rank for source, n in enumerate(receive_sizes) for _ in range(n)]
        assert received.tolist() == wanted
        others += [n for other, n in enumerate(send_sizes) if other != rank and n]

    rows = [2 * other for other in range(num_ranks)]  # rank 0 has none
    mine = torch.full((rows[rank], 3), rank + 0.5, dtype=torch.bfloat16)
    for other, tensor in enumerate(transport.all_gather(mine, rows)):
        assert torch.equal(tensor, torch.full((rows[other], 3), other + 0.5, dtype=mine.dtype))

    assert transport.counters.messages == 2 + len(others)
    assert transport.counters.bytes == 8 + sum(others)
    assert transport.all_gather_numbers([rank, 7]) == [(r, 7) for r in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_virtual_ranks(num_ranks: int) -> None:
    run_virtual_ranks(num_ranks, exercise)


def check_process_group(rank: int) -> None:
    assert dist.group.WORLD is not None
    exercise(ProcessGroupTransport(dist.group.WORLD, torch.device("cpu")))


def test_a_rank_that_is_alone_has_everything_already() -> None:
    mine, transport = torch.ones(3, 2), SoloTransport()
    (found,) = transport.all_gather(mine, [3])
    assert torch.equal(found, mine)
    assert transport.all_gather_numbers([4]) == [(4,)]
    assert transport.counters.messages == 0


def test_processes() -> None:
    run_distributed(check_process_group, 3)


def test_virtual_ranks_that_wait_end_when_one_fails() -> None:
    """At once: in a notebook a failure would else be seen after the time limit only."""
    ended: list[int] = []

    def run(transport: VirtualTransport) -> None:
        if transport.group_rank == 2:
            raise ValueError("on purpose")
        for _ in range(2):  # waiting again ends as well
            with pytest.raises(ConnectionAbortedError, match="for rank 2 when a rank failed"):
                transport.exchange([], [Message(2, torch.empty(1))]).wait()
        ended.append(transport.group_rank)

    with pytest.raises(RuntimeError, match="virtual rank 2 failed: on purpose"):
        run_virtual_ranks(3, run, timeout_s=3600)
    assert sorted(ended) == [0, 1]


def test_a_virtual_rank_that_waits_in_vain_gives_up() -> None:
    def run(transport: VirtualTransport) -> None:
        if transport.group_rank == 0:
            empty = torch.empty(1, dtype=torch.uint8)
            transport.exchange([], [Message(1, empty)]).wait()

    with pytest.raises(RuntimeError, match=r"virtual rank 0 waited 0.2 s for rank 1"):
        run_virtual_ranks(2, run, timeout_s=0.2)


def test_packets_are_views_of_one_buffer() -> None:
    packet = Packet.empty(
        [TensorSpec((2, 3), torch.float32), TensorSpec((5,), torch.bfloat16)], torch.device("cpu")
    )
    packet.tensors[0].fill_(1.0)
    packet.tensors[1].fill_(2.0)
    assert packet.buffer.numel() == 24 + 10
    assert packet.buffer[:24].view(torch.float32).tolist() == [1.0] * 6
