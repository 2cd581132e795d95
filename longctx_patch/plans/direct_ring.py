"""The ring's work with direct sends: only the rows that somebody needs, straight from the owner.

Over zigzag shards a rank before the owner in the ring needs only the owner's front half, and over
contiguous shards nothing at all, so the ring sends a quarter or a half of its bytes for nothing.
Each contribution to dK and dV goes home by itself, rounded once and in the dtype of the model.
"""

from longctx_patch.plans.direct import direct
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.ring import ring_works
from longctx_patch.plans.schedule import Schedule
from longctx_patch.plans.types import Direction


def direct_ring(pieces: PieceTable, direction: Direction, *, name: str = "direct_ring") -> Schedule:
    """Schedule over any layout."""
    num_steps = len(pieces.sizes)
    return direct(name, direction, pieces, num_steps, lambda step: [ring_works(pieces, step)])
