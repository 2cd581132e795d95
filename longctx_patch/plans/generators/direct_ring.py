"""The ring's work with direct sends: only the rows that somebody needs, straight from the owner.

Over zigzag shards a rank before the owner in the ring needs only the owner's front half, and over
contiguous shards nothing at all, so the ring sends a quarter or a half of its bytes for nothing.
Each contribution to dK and dV goes home by itself, rounded once and in the dtype of the model.

Of documents and windows little is needed of each rank. What is so little that nobody has to wait
for it comes all at once, since each exchange takes the CPU longer than the GPU.
"""

from collections.abc import Iterator

import numpy as np

from longctx_patch.plans.generators.direct import direct
from longctx_patch.plans.generators.ring import ring_works
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Schedule, Stage, Works

AT_ONCE = 0.25
"""Most rows of several ranks that arrive at one rank in a step, as a share of its own rows. As many
may leave it, since their gradients come home at once."""


def direct_ring(schedule: Schedule) -> Iterator[Stage]:
    """Stages over any layout."""
    return direct(schedule, _steps(schedule.pieces))


def _steps(pieces: PieceTable) -> Iterator[list[Works]]:
    """What the ranks compute step by step; steps of a ring that need little are done together."""
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
