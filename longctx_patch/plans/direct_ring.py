"""The ring's work with direct sends: only the rows that somebody needs, straight from the owner.

Over zigzag shards a rank before the owner in the ring needs only the owner's front half, and over
contiguous shards nothing at all, so the ring sends a quarter or a half of its bytes for nothing.
Each contribution to dK and dV goes home by itself, rounded once and in the dtype of the model.
"""

from longctx_patch.layout import Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.direct import direct_plan
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.ring import ring_works
from longctx_patch.plans.types import Direction, Plan


def direct_ring(
    layout: Layout, mask: Mask, direction: Direction, *, name: str = "direct_ring"
) -> Plan:
    """Plan of one direction over any layout."""
    pieces = PieceTable(layout, mask)
    works = [ring_works(layout.num_ranks, pieces, step) for step in range(layout.num_ranks)]
    return direct_plan(name, direction, layout, mask, works)
