"""BurstAttention's backward: keys and values stay at home, queries travel (Sun et al. 2024).

The bundle (q, dout, lse, delta) walks the ring; every rank computes its own dK and dV at once, and
sends each dQ straight to the owner, where dQ is summed in float32. The paper lets one running dQ
follow the bundle instead: the same bytes, but rounded at every hop.

This pays where query and key-value heads are equally many; with g query heads per key-value head
the traffic grows with 3 g.
"""

from collections.abc import Iterator

import numpy as np

from longctx_patch.plans.generators.direct import results
from longctx_patch.plans.pieces import NOTHING
from longctx_patch.plans.schedule import Schedule, Stage, Works, whole_blocks
from longctx_patch.plans.types import Direction, Operand


def burst_backward(schedule: Schedule) -> Iterator[Stage]:
    """Stages of backward over any layout; balanced over zigzag shards."""
    pieces = schedule.pieces
    num_ranks = len(pieces.sizes)
    ranks = np.arange(num_ranks)
    finished: tuple[Works, ...] = ()
    for step in range(num_ranks):
        owners, following = (ranks - step) % num_ranks, (ranks + 1) % num_ranks
        hops = whole_blocks(pieces, Operand.Q_BACKWARD, ranks, following, owners, buffer=step % 2)
        works = Works(ranks, owners, ranks, pieces.kinds(owners, ranks))
        works = works.where(works.kind != NOTHING)
        returns = results(pieces, finished, Direction.BACKWARD)
        yield Stage((hops, *returns) if step < num_ranks - 1 else returns, (works,))
        finished = (works,)
    if returns := results(pieces, finished, Direction.BACKWARD):
        yield Stage(returns, ())
