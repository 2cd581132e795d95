"""Double ring: an inner ring in each node, an outer ring across nodes (LoongTrain, BurstEngine).

Ranks are numbered node by node. In window `w` the ranks of a node compute with the blocks of the
node `w` before it, which travel around the inner ring; at the start of the window each rank also
sends its block to the rank of the same place in the next node, for the next window. So a block
crosses each link between nodes once, with a whole window to do so, where a flat ring pushes every
block through the one link at the node's edge.

Backward sums dK and dV of an owner around the inner ring, ends at the rank of the owner's place,
and sends one block home: (nodes - 1) blocks per rank cross, in each direction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.types import Block, Direction, Operand, Plan, Step, Transfer, Work


def double_ring(layout: Layout, mask: Mask, direction: Direction, *, ranks_per_node: int) -> Plan:
    """The plan over any layout; `ranks_per_node` must divide the number of ranks."""
    if layout.num_ranks % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} with {layout.num_ranks} ranks: nodes must be full. "
            "Use a divisor, or the plain ring."
        )
    rings = _Rings(layout, PieceTable(layout, mask), ranks_per_node)
    num_steps = layout.num_ranks + (2 if direction is Direction.BACKWARD else 0)
    steps = [
        Step(
            rings.inner_hops(step)
            + rings.outer_hops(step)
            + (rings.sum_hops(step) if direction is Direction.BACKWARD else ()),
            rings.works(step),
        )
        for step in range(num_steps)
    ]
    while steps and not (steps[-1].transfers or steps[-1].works):
        steps.pop()
    return Plan("double_ring", direction, layout, mask, tuple(steps))


@dataclass(frozen=True)
class _Rings:
    layout: Layout
    pieces: PieceTable
    per_node: int

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.per_node

    def owner(self, rank: int, step: int) -> int:
        """Whose block a rank computes with."""
        window, place = divmod(step, self.per_node)
        node, local = divmod(rank, self.per_node)
        return self.rank(node - window, local - place)

    def rank(self, node: int, local: int) -> int:
        return node % self.num_nodes * self.per_node + local % self.per_node

    def works(self, step: int) -> tuple[Work, ...]:
        if step >= self.num_ranks:
            return ()
        owners = ((rank, self.owner(rank, step)) for rank in range(self.num_ranks))
        works = (Work(rank, rank, owner, self.pieces(rank, owner)) for rank, owner in owners)
        return tuple(work for work in works if work.pieces)

    def inner_hops(self, step: int) -> tuple[Transfer, ...]:
        if step % self.per_node == self.per_node - 1 or step >= self.num_ranks:
            return ()
        return self._hops(step, lambda node, local: self.rank(node, local + 1), step % 2)

    def outer_hops(self, step: int) -> tuple[Transfer, ...]:
        window, place = divmod(step, self.per_node)
        if place or window >= self.num_nodes - 1:
            return ()
        return self._hops(step, lambda node, local: self.rank(node + 1, local), 2 + window % 2)

    def _hops(
        self, step: int, destination: Callable[[int, int], int], buffer: int
    ) -> tuple[Transfer, ...]:
        blocks = ((rank, self._block(Operand.KV, self.owner(rank, step))) for rank in self._ranks)
        return tuple(
            Transfer(rank, destination(*divmod(rank, self.per_node)), block, buffer)
            for rank, block in blocks
            if block.rows.size
        )

    def sum_hops(self, step: int) -> tuple[Transfer, ...]:
        """Pass on what was finished in the step before; send home what a window has finished."""
        hops = []
        for owner in self._ranks:
            node, local = divmod(owner, self.per_node)
            for window in range(self.num_nodes):
                first = window * self.per_node
                home = self.rank(node + window, local)  # the owner itself in window 0
                place = step - 1 - first
                if 1 <= place < self.per_node:
                    visitors = [self.rank(node + window, local + i) for i in range(1, place + 1)]
                    hops += self._sum_hop(owner, visitors, visitors[-1])
                if window and step == first + self.per_node + (self.per_node > 1):
                    everyone = [self.rank(node + window, i) for i in range(self.per_node)]
                    hops += self._sum_hop(owner, everyone, home, destination=owner)
        return tuple(hops)

    def _sum_hop(
        self, owner: int, visitors: list[int], source: int, destination: int | None = None
    ) -> list[Transfer]:
        """One hop of an owner's sum, unless none of the visitors has added to it."""
        if not any(self.pieces(visitor, owner) for visitor in visitors):
            return []
        if destination is None:
            node, local = divmod(source, self.per_node)
            destination = self.rank(node, local + 1)
        return [Transfer(source, destination, self._block(Operand.DKV_SUM, owner), buffer=None)]

    @property
    def _ranks(self) -> range:
        return range(self.num_ranks)

    def _block(self, operand: Operand, owner: int) -> Block:
        return Block(operand, owner, Interval(0, self.layout.sizes[owner]))
