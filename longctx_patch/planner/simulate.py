"""Simulate a schedule on a machine: when each rank computes, sends and waits.

Every rank has a clock for its device and one for the CPU that feeds it. In a stage a rank packs
what it sends (`copies.py`), computes while the messages travel, and goes on when both are done. A
message starts when both ends have reached its stage, and takes as long as the busier of the two
ends needs for all that it sends or receives in the stage over that kind of link.

The arrays are those of the schedule, so a ring of 4,096 ranks takes seconds (an all-gather, whose
messages go from everyone to everyone, half a minute).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx_patch.planner.charges import Charges, Floats
from longctx_patch.planner.machines import Hardware, Link
from longctx_patch.plans.pieces import Ints
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.traffic import AttentionShape
from longctx_patch.plans.types import EVERYONE, Operand, Share


class Packing:
    """Keeps what each rank has copied and received so far."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.kept_bytes: Floats = np.zeros(num_ranks)
        """Bytes of each rank's packed inputs, which stay until the call ends."""
        self._packed: dict[tuple[Operand, Share, int], np.ndarray] = {}
        self._sum_at: Ints = np.full(num_ranks, -1)  # by rank: whose sum arrived last

    def copied_bytes(self, moves: Moves, sizes: Floats) -> Floats:
        """The bytes that each rank must copy to send these messages."""
        if moves.operand.is_input:
            return self._own_blocks(moves, sizes)
        copied = np.ones(len(sizes), dtype=bool)
        if moves.operand.is_sum:
            copied = self._sum_at[moves.source] != moves.owner
        copied_sizes = np.where(copied, sizes, 0.0)
        return np.bincount(moves.source, copied_sizes, self.num_ranks).astype(np.float64)

    def land(self, moves: Moves) -> None:
        """Note the sums that arrive."""
        if moves.operand.is_sum:
            self._sum_at[moves.destination] = moves.owner

    def _own_blocks(self, moves: Moves, sizes: Floats) -> Floats:
        copied = np.zeros(self.num_ranks)
        own = moves.source == moves.owner
        for rows in np.unique(moves.rows[own]).tolist():
            chosen = own & (moves.rows == rows)
            block = np.zeros(self.num_ranks)
            block[moves.source[chosen]] = sizes[chosen]
            key = (moves.operand, moves.heads, rows)
            done = self._packed.setdefault(key, np.zeros(self.num_ranks, dtype=bool))
            copied += np.where(done, 0.0, block)
            done |= block > 0
        self.kept_bytes += copied
        return copied


class Span(NamedTuple):
    """Something that takes time on one rank: attention, or a message that it receives."""

    rank: int
    lane: Literal["compute", "transfer"]
    start_s: float
    stop_s: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Holds what a schedule takes; tuples have an entry for each rank."""

    makespan_s: float
    host_s: float
    """Seconds that the busiest rank's CPU takes to launch everything, in parallel to the device."""
    idle_fraction: float
    """Share of rank-time without work, if a step took as long as its busiest rank's area."""
    kernel_s: float
    """Mean of the ranks' seconds in which the device runs attention's kernels."""
    copy_s: float
    """Mean of the ranks' seconds in which the device copies and adds."""
    exposed_communication_s: float
    """What the makespan would lose if links took no time."""
    bytes_sent: tuple[int, ...]
    messages: tuple[int, ...]
    peak_buffer_bytes: int
    """Bytes of others' blocks and of results under way, on the rank that holds most."""
    spans: tuple[Span, ...] = ()


def simulate(
    schedule: Schedule,
    shape: AttentionShape,
    hardware: Hardware,
    *,
    ranks_per_node: int,
    with_spans: bool = False,
) -> Simulation:
    """Simulate all stages; `ranks_per_node` consecutive ranks share a node."""
    player = _Player(schedule, shape, hardware, ranks_per_node, with_spans)
    unhindered = _Player(schedule, shape, hardware.with_free_links(), ranks_per_node, False)
    for stage in schedule.stages():
        player.play(stage)
        unhindered.play(stage)
    return player.result(unhindered.finish_s())


class _Player:
    """The clocks of all ranks and what has been counted so far; arrays are by rank."""

    def __init__(
        self,
        schedule: Schedule,
        shape: AttentionShape,
        hardware: Hardware,
        ranks_per_node: int,
        with_spans: bool,
    ) -> None:
        self.num_ranks = schedule.num_ranks
        self.charges = Charges(schedule.pieces, schedule.direction, shape, hardware)
        self.hardware = hardware
        self.ranks_per_node = ranks_per_node
        self.spans: list[Span] | None = [] if with_spans else None
        self.device_s, self.host_s = np.zeros((2, self.num_ranks))
        self.kernel_s, self.copy_s = np.zeros((2, self.num_ranks))
        self.sent, self.messages = np.zeros((2, self.num_ranks), dtype=np.int64)
        self.memory = _Memory(self.num_ranks)
        self.packing = Packing(self.num_ranks)
        self.has_delta = False
        # By group of heads: the ranks that have a total of their own to add to.
        self.has_total: dict[Share, NDArray[np.bool_]] = {}
        self.summed_rows = np.zeros(self.num_ranks)
        """Number of each rank's query rows that have several results, or an upper bound of it."""
        self.busiest_area = self.total_area = 0.0

    def play(self, stage: Stage) -> None:
        sizes = [self.charges.sizes(moves) for moves in stage.moves]
        self.host_s += self._host_messages([m for m in stage.moves if m.operand.is_input])
        self.host_s += self._host_messages([m for m in stage.moves if not m.operand.is_input])
        packing = self._pack(stage.moves, sizes)
        posted = np.maximum(self.device_s, self.host_s) + packing
        arrived = self._travel(stage.moves, sizes, posted)
        computed = self._compute(stage, posted, self._disturbed(stage.moves, sizes))
        landing = self._sum_by(
            [moves.destination for moves in stage.moves],
            [self.charges.landing_seconds(*pair) for pair in zip(stage.moves, sizes, strict=True)],
        )
        self.device_s = np.maximum(np.maximum(computed, self.host_s), arrived) + landing
        self.copy_s += packing + landing
        self.summed_rows += self._landed_rows(stage.moves)
        self._count(stage, sizes)

    def finish_s(self) -> float:
        """The time at which the last rank is done."""
        return float((np.maximum(self.device_s, self.host_s) + self._closing_s()).max())

    def _closing_s(self) -> Floats:
        rows = np.minimum(self.summed_rows, self.charges.pieces.sizes)
        return self.charges.closing_seconds(rows)

    def result(self, unhindered_s: float) -> Simulation:
        rank_area = self.busiest_area * self.num_ranks
        return Simulation(
            makespan_s=self.finish_s(),
            host_s=float(self.host_s.max()),
            idle_fraction=1 - self.total_area / rank_area if rank_area else 0.0,
            kernel_s=float(self.kernel_s.mean()),
            copy_s=float((self.copy_s + self._closing_s()).mean()),
            exposed_communication_s=max(0.0, self.finish_s() - unhindered_s),
            bytes_sent=tuple(self.sent.tolist()),
            messages=tuple(self.messages.tolist()),
            peak_buffer_bytes=int(self.memory.peak.max()),
            spans=tuple(self.spans or ()),
        )

    def _pack(self, lanes: Iterable[Moves], sizes: Iterable[Floats]) -> Floats:
        seconds = np.zeros(self.num_ranks)
        for moves, size in zip(lanes, sizes, strict=True):
            seconds += self.charges.copy_seconds(self.packing.copied_bytes(moves, size))
            if moves.operand is Operand.Q_BACKWARD and not self.has_delta:
                seconds += self.charges.delta_seconds()
                self.has_delta = True
        for moves in lanes:
            self.packing.land(moves)
        return seconds

    def _travel(self, lanes: tuple[Moves, ...], sizes: list[Floats], posted: Floats) -> Floats:
        """The times at which each rank's messages have all come and gone."""
        done = posted.copy()
        if not lanes:
            return done
        source = np.concatenate([moves.source for moves in lanes])
        destination = np.concatenate([moves.destination for moves in lanes])
        size = np.concatenate(sizes)
        begin = np.maximum(posted[source], posted[destination])
        near = source // self.ranks_per_node == destination // self.ranks_per_node
        end = begin.copy()
        for chosen, link in ((near, self.hardware.intra_node), (~near, self.hardware.inter_node)):
            if chosen.any():
                seconds = self._link_seconds(
                    source[chosen], destination[chosen], size[chosen], link
                )
                end[chosen] += seconds
        for rank in (source, destination):
            np.maximum.at(done, rank, end)
        if self.spans is not None:
            labels = [moves.operand.name for moves in lanes for _ in moves.source]
            rows = zip(destination.tolist(), begin.tolist(), end.tolist(), labels, strict=True)
            self.spans += [Span(rank, "transfer", a, b, label) for rank, a, b, label in rows]
        return done

    def _disturbed(self, lanes: tuple[Moves, ...], sizes: list[Floats]) -> Floats:
        """Seconds for which each rank's messages would keep its link busy inside its node.

        Moving bytes takes multiprocessors and memory bandwidth from the kernel that runs meanwhile.
        That was measured inside a node and is charged by the byte: a slower link disturbs the
        kernel longer but less.
        """
        leaving = self._sum_by([moves.source for moves in lanes], sizes)
        entering = self._sum_by([moves.destination for moves in lanes], sizes)
        return np.maximum(leaving, entering) / self.hardware.intra_node.bandwidth

    def _link_seconds(self, source: Ints, destination: Ints, size: Floats, link: Link) -> Floats:
        leaving = np.bincount(source, size, self.num_ranks)[source]
        entering = np.bincount(destination, size, self.num_ranks)[destination]
        return link.latency_s + np.maximum(leaving, entering) / link.bandwidth

    def _compute(self, stage: Stage, posted: Floats, disturbed: Floats) -> Floats:
        """The times at which each rank has computed its works, slowed down by its messages."""
        ranks = [works.rank for works in stage.works]
        kernels = self._sum_by(ranks, [self.charges.kernel_seconds(w) for w in stage.works])
        kernels += self._sum_by(ranks, [self.charges.expanding_seconds(w) for w in stage.works])
        prepared = self._sum_by(ranks, [self.charges.preparing_seconds(w) for w in stage.works])
        added = self._sum_by(ranks, [self._adding_seconds(w) for w in stage.works])
        self.host_s += self._sum_by(ranks, [self.charges.host_seconds(w) for w in stage.works])
        lost = self.hardware.overlap_slowdown * np.minimum(kernels, disturbed)
        computed = posted + prepared + kernels + lost + added
        self.kernel_s += kernels + lost
        self.copy_s += prepared + added
        for works in stage.works if self.spans is not None else ():
            self._record(works, posted, computed)
        return computed

    def _adding_seconds(self, works: Works) -> Floats:
        has_total = self.has_total.setdefault(works.heads, np.zeros(self.num_ranks, dtype=bool))
        is_first = ~has_total[works.rank]
        seconds = self.charges.adding_seconds(works, is_first)
        self.summed_rows += self._sum_by(
            [works.q_owner], [self.charges.query_rows_added(works, is_first)]
        )
        has_total[works.rank] = True
        return seconds

    def _landed_rows(self, lanes: Iterable[Moves]) -> Floats:
        """The number of rows of queries' results that came to each rank."""
        results = [m for m in lanes if not (m.operand.is_input or m.operand.is_of_keys)]
        rows = [self.charges.pieces.num_rows(moves.rows) for moves in results]
        return self._sum_by([moves.destination for moves in results], rows)

    def _record(self, works: Works, posted: Floats, computed: Floats) -> None:
        assert self.spans is not None
        columns = (works.rank, works.q_owner, works.kv_owner)
        for rank, q, kv in zip(*(column.tolist() for column in columns), strict=True):
            label = _label(q, kv, works.heads)
            self.spans.append(Span(rank, "compute", posted[rank], computed[rank], label))

    def _count(self, stage: Stage, sizes: list[Floats]) -> None:
        ranks = [works.rank for works in stage.works]
        areas = self._sum_by(ranks, [self.charges.areas(works) for works in stage.works])
        self.busiest_area += float(areas.max(initial=0.0))
        self.total_area += float(areas.sum())
        for moves, size in zip(stage.moves, sizes, strict=True):
            self.messages += np.bincount(moves.source, minlength=self.num_ranks)
            self.sent += np.bincount(moves.source, size, self.num_ranks).astype(np.int64)
        gathered = self._sum_by(ranks, [self.charges.gathered_bytes(w) for w in stage.works])
        self.memory.add(stage.moves, sizes, self.packing.kept_bytes + gathered)

    def _host_messages(self, lanes: list[Moves]) -> Floats:
        """Seconds of each rank's CPU for one batch of messages, where the rank takes part in it."""
        ends = [rank for moves in lanes for rank in (moves.source, moves.destination)]
        messages = self._sum_by(ends, [np.ones(len(rank)) for rank in ends])
        batches = (messages > 0) * self.hardware.host_exchange_s
        return batches + messages * self.hardware.host_message_s

    def _sum_by(self, ranks: Iterable[Ints], values: Iterable[NDArray]) -> Floats:
        total = np.zeros(self.num_ranks)
        for rank, value in zip(ranks, values, strict=True):
            total += np.bincount(rank, value, self.num_ranks)
        return total


class _Memory:
    """Bytes that each rank holds beside its own tensors."""

    def __init__(self, num_ranks: int) -> None:
        self.buffers: Floats = np.zeros((num_ranks, 0))
        self.peak: Floats = np.zeros(num_ranks)

    def add(self, lanes: Iterable[Moves], sizes: Iterable[Floats], beside: Floats) -> None:
        """Add a step: bytes in buffers, on their way in or out, and `beside` them."""
        results = beside.copy()
        for moves, size in zip(lanes, sizes, strict=True):
            if moves.buffer is None:
                for rank in (moves.source, moves.destination):
                    results += np.bincount(rank, size, len(results))
            elif len(moves.buffer):
                self._widen(int(moves.buffer.max()) + 1)
                self.buffers[moves.destination, moves.buffer] = size
        self.peak = np.maximum(self.peak, self.buffers.sum(axis=1) + results)

    def _widen(self, num_buffers: int) -> None:
        missing = num_buffers - self.buffers.shape[1]
        if missing > 0:
            self.buffers = np.pad(self.buffers, ((0, 0), (0, missing)))


def _label(q_owner: int, kv_owner: int, heads: Share) -> str:
    keys = "all" if kv_owner == EVERYONE else str(kv_owner)
    part = f" h{heads.part}" if heads.parts > 1 else ""
    return f"Q{q_owner} x KV{keys}{part}"
