"""Counts what each rank sends for one recurrence: states along a chain, heads for tokens."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from longctx_patch.plans.chain import Chain, ChainTraffic, make_chain
from longctx_patch.plans.head_split import HeadSplit
from longctx_patch.plans.recurrent import RecurrentShape, RecurrentWay, heads_traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, LayoutName
from longctx_patch.sequence.placement import place


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row, and the ranks that share it."""

    documents: Documents
    placement: LayoutName
    ring: int
    ulysses: int

    @property
    def layout(self) -> Layout:
        return place(self.placement, self.documents, ring=self.ring, ulysses=self.ulysses)

    @property
    def ring_layout(self) -> Layout:
        """The layout of the ring's part, in which a rank is a Ulysses group."""
        return place(self.placement, self.documents, ring=self.ring)


def recurrence_traffic(
    shape: RecurrentShape, row: Row, way: RecurrentWay
) -> tuple[ChainTraffic, ...]:
    """Returns what each rank sends for one layer's recurrence."""
    if way == "states":
        return states_traffic(shape, make_chain(row.layout, row.documents))
    mine = of_one_rank(shape, row.ulysses)
    in_ring = states_traffic(mine, make_chain(row.ring_layout, row.documents))
    return tuple(
        exchange.plus(in_ring[rank // row.ulysses])
        for rank, exchange in enumerate(exchanges_traffic(shape, row))
    )


def of_one_rank(shape: RecurrentShape, degree: int) -> RecurrentShape:
    """The heads that each rank of a Ulysses group computes."""
    (groups,) = {cut.size for cut in _split(shape, degree).key_value}
    return replace(shape, num_heads=shape.num_heads // degree, num_groups=groups)


def _split(shape: RecurrentShape, degree: int) -> HeadSplit:
    return HeadSplit(shape.num_heads, shape.num_groups, degree)


def item_bytes(shape: RecurrentShape, chain: Chain, number: int) -> int:
    """Counts a segment's bytes; where it begins its document only the state travels."""
    m = 0 if chain.segments[number].begins else shape.map_numbers
    return (shape.state_numbers + m) * shape.wide_itemsize


@lru_cache(maxsize=64)
def states_traffic(shape: RecurrentShape, chain: Chain) -> tuple[ChainTraffic, ...]:
    return chain.traffic_of_ranks(chain.states, partial(item_bytes, shape, chain))


def exchanges_traffic(shape: RecurrentShape, row: Row) -> list[ChainTraffic]:
    """Returns what each rank sends in the exchanges of heads."""
    sizes, degree = row.layout.sizes, row.ulysses
    return [
        heads_traffic(
            _split(shape, degree),
            shape.inputs,
            shape.output,
            rank % degree,
            sizes=sizes[rank - rank % degree : rank - rank % degree + degree],
            batch=shape.batch,
        )
        for rank in range(len(sizes))
    ]
