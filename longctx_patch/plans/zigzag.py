"""Zigzag with direct sends: the ring's work, and only the rows that somebody needs.

Over zigzag shards a rank before the owner in the ring needs only the owner's front half, so a
quarter of what the ring sends is never read. Sending straight from the owner leaves that out, and
each contribution to dK and dV goes home by itself, rounded once and in the dtype of the model.
"""

from longctx_patch.layout import Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.direct import direct_plan
from longctx_patch.plans.ring import ring_works
from longctx_patch.plans.types import Direction, Plan


def zigzag_direct(layout: Layout, mask: Mask, direction: Direction) -> Plan:
    """Ring attention's work over any layout, with needed rows sent directly."""
    works = [ring_works(layout, mask, step) for step in range(layout.num_ranks)]
    return direct_plan("zigzag_direct", direction, layout, mask, works)
