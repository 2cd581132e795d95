"""Schedules as arrays with an entry per rank: what generators write, for 4 ranks or for 4,096.

A schedule yields its stages one by one and keeps none. The simulator reads the arrays as they are;
`Schedule.plan` expands them into the steps that are verified and executed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx_patch.plans.pieces import Ints, PieceTable
from longctx_patch.plans.types import (
    ALL_HEADS,
    Block,
    Direction,
    Operand,
    Plan,
    Share,
    Step,
    Transfer,
    Work,
)


class Works(NamedTuple):
    """Tiles, at most one for each rank: `rank` computes the attention of `q_owner`'s queries to
    `kv_owner`'s keys."""

    rank: Ints
    q_owner: Ints
    kv_owner: Ints
    kind: Ints
    """The pieces of each tile, by their number in the schedule's `PieceTable`."""
    heads: Share = ALL_HEADS

    def where(self, chosen: NDArray[np.bool_]) -> "Works":
        """The tiles that are chosen."""
        rank, q_owner, kv_owner, kind = (column[chosen] for column in self[:4])
        return Works(rank, q_owner, kv_owner, kind, self.heads)


class Moves(NamedTuple):
    """Messages that carry the same operand; arrays have an entry for each."""

    operand: Operand
    source: Ints
    destination: Ints
    owner: Ints
    rows: Ints
    """The slots of the owner that each carries, by their number in the schedule's `PieceTable`."""
    buffer: Ints | None
    """Number of the buffer in which each input lands; None for results."""
    heads: Share = ALL_HEADS

    def where(self, chosen: NDArray[np.bool_]) -> "Moves":
        """The messages that are chosen."""
        source, destination, owner, rows = (column[chosen] for column in self[1:5])
        buffer = None if self.buffer is None else self.buffer[chosen]
        return Moves(self.operand, source, destination, owner, rows, buffer, self.heads)


class Stage(NamedTuple):
    """One step of all ranks: what is sent while what is computed."""

    moves: tuple[Moves, ...]
    works: tuple[Works, ...]


@dataclass(frozen=True)
class Schedule:
    """One direction of attention over the ranks of a layout."""

    name: str
    direction: Direction
    pieces: PieceTable
    generate: "Callable[[Schedule], Iterator[Stage]]"
    """The generator: it reads the other fields and decides who computes and sends what when."""
    num_kv_heads: int = 1
    """Key-value heads that each rank computes."""
    ranks_per_node: int = 1
    """Consecutive ranks on one machine."""

    def stages(self) -> Iterator[Stage]:
        """The stages, made anew at each call."""
        return self.generate(self)

    @property
    def num_ranks(self) -> int:
        return self.pieces.layout.num_ranks

    def plan(self) -> Plan:
        """The same schedule as steps, all in memory at once: for moderate numbers of ranks."""
        steps = tuple(
            Step(
                tuple(transfer for moves in stage.moves for transfer in self._transfers(moves)),
                tuple(work for works in stage.works for work in self._works(works)),
            )
            for stage in self.stages()
        )
        return Plan(self.name, self.direction, self.pieces.layout, self.pieces.mask, steps)

    def _works(self, works: Works) -> Iterator[Work]:
        columns = (works.rank, works.q_owner, works.kv_owner, works.kind)
        for rank, q_owner, kv_owner, kind in zip(*(c.tolist() for c in columns), strict=True):
            yield Work(rank, q_owner, kv_owner, self.pieces.of_kind(kind), works.heads)

    def _transfers(self, moves: Moves) -> Iterator[Transfer]:
        buffers = [None] * len(moves.source) if moves.buffer is None else moves.buffer.tolist()
        columns = (moves.source, moves.destination, moves.owner, moves.rows)
        entries = zip(*(c.tolist() for c in columns), buffers, strict=True)
        for source, destination, owner, rows, buffer in entries:
            block = Block(moves.operand, owner, self.pieces.of_rows(rows), moves.heads)
            yield Transfer(source, destination, block, buffer)


def whole_blocks(
    pieces: PieceTable,
    operand: Operand,
    source: Ints,
    destination: Ints,
    owner: Ints,
    buffer: int | None,
) -> Moves:
    """Messages that carry all rows of their owners; there is none where an owner has no rows."""
    buffers = None if buffer is None else np.full_like(source, buffer)
    moves = Moves(operand, source, destination, owner, pieces.whole(owner), buffers)
    return moves.where(pieces.sizes[owner] > 0)
