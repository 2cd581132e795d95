"""The ring's work with direct sends: only the rows that somebody needs, straight from the owner.

Over zigzag shards a rank before the owner in the ring needs only the owner's front half, and over
contiguous shards nothing at all, so the ring sends a quarter or a half of its bytes for nothing.
Each contribution to dK and dV goes home by itself, rounded once and in the dtype of the model.

Under documents and windows little is needed from each rank. Steps that need so little that no rank
has to wait for it share one exchange, since each exchange takes the CPU longer than the GPU.
"""

from collections.abc import Iterator

import numpy as np

from longctx_patch.plans.generators.direct import direct
from longctx_patch.plans.generators.ring import ring_works
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Schedule, Stage, Works

AT_ONCE = 0.25
"""Ring steps are merged as long as at most this share of a rank's own rows arrives at the rank, and
at most this share leaves it, since gradients of the rows that leave come home together."""


def direct_ring(schedule: Schedule) -> Iterator[Stage]:
    """Stages over any layout."""
    return direct(schedule, _steps(schedule.pieces))


def _steps(pieces: PieceTable) -> Iterator[list[Works]]:
    """The works of the ranks, step by step; steps of a ring that need little are done together."""
    yield [ring_works(pieces, 0)]
    together: list[Works] = []
    travelling = np.zeros((2, len(pieces.sizes)))
    for step in range(1, len(pieces.sizes)):
        works = ring_works(pieces, step)
        rows = pieces.num_rows(pieces.kv_rows(works.kind))
        ends = (works.rank, works.kv_owner)
        needed = np.stack([np.bincount(end, rows, len(pieces.sizes)) for end in ends])
        if together and (travelling + needed > AT_ONCE * pieces.sizes).any():
            yield together
            together, travelling = [], np.zeros_like(travelling)
        together.append(works)
        travelling += needed
    yield together
