import pytest

from longctx_patch.config import LAYOUTS_OF_PLAN
from longctx_patch.plans import AttentionShape, Direction, Plan, make_schedule, plan_traffic
from longctx_patch.plans.traffic import bytes_per_link
from longctx_patch.sequence.layout import make_layout
from longctx_patch.sequence.masks import causal

TOKENS = 16
"""Of one rank."""
SHAPE = AttentionShape(batch=2, num_heads=8, num_kv_heads=2, head_dim=16, itemsize_bytes=2)


def make_plan(name: str, num_ranks: int, direction: Direction) -> Plan:
    layout = make_layout(LAYOUTS_OF_PLAN[name][0], TOKENS * num_ranks, ring=num_ranks)
    return make_schedule(
        name,
        direction,
        layout,
        causal(layout.num_tokens),
        num_kv_heads=SHAPE.num_kv_heads,
        ranks_per_node=2,
    ).plan()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "name", ["ring", "zigzag_direct", "distflash_balanced", "burst", "allgather", "double_ring"]
)
def test_links_add_up_to_what_each_rank_sends(name: str, direction: Direction) -> None:
    plan = make_plan(name, 4, direction)
    links = bytes_per_link(plan, SHAPE)
    assert all(carried > 0 for carried in links.values())
    for rank, sent in enumerate(plan_traffic(plan, SHAPE)):
        assert sum(links[link] for link in links if link[0] == rank) == sent.bytes


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_ring_uses_the_link_to_the_next_rank(num_ranks: int) -> None:
    hops = num_ranks - 1
    block = TOKENS * SHAPE.batch * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.itemsize_bytes
    following = {(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)}
    forward = bytes_per_link(make_plan("zigzag", num_ranks, Direction.FORWARD), SHAPE)
    assert forward == dict.fromkeys(following, 2 * hops * block)
    # Backward: keys and values again, and their gradients in float32.
    backward = bytes_per_link(make_plan("zigzag", num_ranks, Direction.BACKWARD), SHAPE)
    assert backward == dict.fromkeys(following, (2 + 4) * hops * block)


def test_one_rank_uses_no_link() -> None:
    assert bytes_per_link(make_plan("ring", 1, Direction.FORWARD), SHAPE) == {}
