"""Plans by name."""

from longctx_patch.layout import Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.burst import burst_backward
from longctx_patch.plans.direct_ring import direct_ring
from longctx_patch.plans.distflash import distflash
from longctx_patch.plans.double_ring import double_ring
from longctx_patch.plans.ring import ring_backward, ring_forward
from longctx_patch.plans.types import Direction, Plan


def make_named_plan(
    name: str,
    direction: Direction,
    layout: Layout,
    mask: Mask,
    *,
    ranks_per_node: int | None = None,
) -> Plan:
    """The plan that `LongContextConfig.plan` calls `name`, over the layout it is made for."""
    if name == "double_ring":
        assert ranks_per_node is not None, "the config has checked it"
        return double_ring(layout, mask, direction, ranks_per_node=ranks_per_node)
    if name in ("distflash", "distflash_balanced"):
        return distflash(layout, mask, direction, balanced=name == "distflash_balanced")
    if name == "zigzag_direct":
        return direct_ring(layout, mask, direction, name=name)
    if name == "burst" and direction is Direction.BACKWARD:
        return burst_backward(layout, mask)
    generate = ring_forward if direction is Direction.FORWARD else ring_backward
    return generate(layout, mask, name=name)
