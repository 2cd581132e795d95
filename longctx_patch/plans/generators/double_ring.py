"""Double ring: an inner ring in each node, an outer ring across nodes (LoongTrain, BurstEngine).

Ranks are numbered node by node. In window `w` the ranks of a node compute with the blocks of the
node `w` before it, which travel around the inner ring; at the start of the window each rank also
sends its block to the rank of the same place in the next node, for the next window. So a block
crosses each link between nodes once, with a whole window to do so, where a flat ring pushes every
block through the one link at the node's edge.

In backward an owner's dK and dV are summed around the inner ring. The sum ends at the rank with the
owner's place in its node, which sends it home: (nodes - 1) blocks per rank cross between nodes, in
each direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longctx_patch.plans.pieces import NOTHING, Ints, PieceTable
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works, whole_blocks
from longctx_patch.plans.types import Direction, Operand


def double_ring(schedule: Schedule) -> Iterator[Stage]:
    """Stages over any layout whose ranks fill the nodes."""
    rings = _Rings(schedule.pieces, schedule.ranks_per_node)
    forward = schedule.direction is Direction.FORWARD
    return rings.forward_stages() if forward else rings.backward_stages()


@dataclass(frozen=True)
class _Rings:
    pieces: PieceTable
    per_node: int

    @property
    def num_ranks(self) -> int:
        return len(self.pieces.sizes)

    @property
    def ranks(self) -> Ints:
        return np.arange(self.num_ranks)

    def moved(self, ranks: Ints, nodes: int, places: int) -> Ints:
        """The ranks that are so many nodes and places further, around both rings."""
        node, place = np.divmod(ranks, self.per_node)
        node = (node + nodes) % (self.num_ranks // self.per_node)
        return node * self.per_node + (place + places) % self.per_node

    def owners(self, step: int) -> Ints:
        """The owner of the block that each rank computes with."""
        window, place = divmod(step, self.per_node)
        return self.moved(self.ranks, -window, -place)

    def works(self, step: int) -> Works:
        owners = self.owners(step)
        works = Works(self.ranks, self.ranks, owners, self.pieces.kinds(self.ranks, owners))
        return works.where(works.kind != NOTHING)

    def forward_stages(self) -> Iterator[Stage]:
        for step in range(self.num_ranks):
            yield Stage(self.hops(step), (self.works(step),))

    def backward_stages(self) -> Iterator[Stage]:
        nobody = np.zeros(self.num_ranks, dtype=bool)
        # By owner, whether a sum has begun in this window: `visited` at ranks of other places in
        # the node, `met` at any rank.
        visited = met = met_before = nobody
        for step in range(self.num_ranks + 2):
            first_of_window = step % self.per_node == 0
            if first_of_window:
                met_before = met
            sums = (*self.sum_hops(step, visited), *self.sums_home(step, met_before))
            if first_of_window:
                visited, met = nobody.copy(), nobody.copy()
            if step < self.num_ranks:
                works = self.works(step)
                yield Stage((*self.hops(step), *sums), (works,))
                met[works.kv_owner] = True
                visited[works.kv_owner] |= not first_of_window
            elif sums:
                yield Stage(sums, ())

    def hops(self, step: int) -> tuple[Moves, ...]:
        """Key-value blocks travel around the inner ring, and once a window to the next node."""
        window, place = divmod(step, self.per_node)
        moves = []
        if place < self.per_node - 1:
            moves.append(self._hop(step, self.moved(self.ranks, 0, 1), buffer=step % 2))
        if place == 0 and window < self.num_ranks // self.per_node - 1:
            moves.append(self._hop(step, self.moved(self.ranks, 1, 0), buffer=2 + window % 2))
        return tuple(moves)

    def _hop(self, step: int, destinations: Ints, buffer: int) -> Moves:
        owners = self.owners(step)
        return whole_blocks(self.pieces, Operand.KV, self.ranks, destinations, owners, buffer)

    def sum_hops(self, step: int, visited: np.ndarray) -> tuple[Moves, ...]:
        """Sums that were added to in the step before are passed on inside the nodes."""
        if (step - 1) % self.per_node == 0 or not 0 < step <= self.num_ranks:
            return ()
        finished, following = self.owners(step - 1), self.moved(self.ranks, 0, 1)
        return self._sums(self.ranks, following, finished, visited)

    def sums_home(self, step: int, met: np.ndarray) -> tuple[Moves, ...]:
        """Sums of a window are sent home once their last hop has arrived."""
        window, rest = divmod(step - (self.per_node > 1), self.per_node)
        if rest or window < 2:
            return ()
        return self._sums(self.moved(self.ranks, window - 1, 0), self.ranks, self.ranks, met)

    def _sums(
        self, source: Ints, destination: Ints, owner: Ints, begun: np.ndarray
    ) -> tuple[Moves, ...]:
        moves = whole_blocks(self.pieces, Operand.DKV_SUM, source, destination, owner, buffer=None)
        moves = moves.where(begun[moves.owner])
        return (moves,) if len(moves.source) else ()
