"""Schedules by name."""

from longctx_patch.plans.generators.allgather import allgather
from longctx_patch.plans.generators.burst import burst_backward
from longctx_patch.plans.generators.direct_ring import direct_ring
from longctx_patch.plans.generators.distflash import distflash
from longctx_patch.plans.generators.double_ring import double_ring
from longctx_patch.plans.generators.ring import ring
from longctx_patch.plans.pieces import piece_table
from longctx_patch.plans.schedule import Schedule
from longctx_patch.plans.types import Direction
from longctx_patch.sequence.layout import Layout
from longctx_patch.sequence.masks import Mask

MAX_HEAD_GROUPS = 4
"""Groups of key-value heads of `allgather`: more hide more of the first gather, but each kernel
call has fewer heads to fill the device with."""


def make_schedule(
    name: str,
    direction: Direction,
    layout: Layout,
    mask: Mask,
    *,
    num_kv_heads: int,
    ranks_per_node: int | None = None,
) -> Schedule:
    """The schedule that `LongContextConfig.plan` calls `name`, over a layout it is made for."""
    pieces = piece_table(layout, mask)
    if name == "allgather":
        return allgather(pieces, direction, head_groups=min(num_kv_heads, MAX_HEAD_GROUPS))
    if name == "double_ring":
        assert ranks_per_node is not None, "the config has checked it"
        return double_ring(pieces, direction, ranks_per_node=ranks_per_node)
    if name in ("distflash", "distflash_balanced"):
        return distflash(pieces, direction, balanced=name == "distflash_balanced")
    if name in ("zigzag_direct", "halo"):
        return direct_ring(pieces, direction, name=name)
    if name == "burst" and direction is Direction.BACKWARD:
        return burst_backward(pieces)
    return ring(pieces, direction, name=name)
