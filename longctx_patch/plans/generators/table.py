"""Every schedule by its name: one record each, from which all else learns about a plan.

To add a schedule, write its generator and add its record here. A generator yields the stages of a
`Schedule`: who computes whose queries against whose keys in which step (`Works`), and who sends
what meanwhile (`Moves`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from longctx_patch.plans.generators.allgather import allgather
from longctx_patch.plans.generators.burst import burst_backward
from longctx_patch.plans.generators.direct_ring import direct_ring
from longctx_patch.plans.generators.distflash import distflash
from longctx_patch.plans.generators.double_ring import double_ring
from longctx_patch.plans.generators.ring import ring
from longctx_patch.plans.pieces import piece_table
from longctx_patch.plans.schedule import Schedule, Stage
from longctx_patch.plans.types import Direction
from longctx_patch.rules.names import require_choice
from longctx_patch.sequence.layout import Layout, LayoutName
from longctx_patch.sequence.masks import Mask


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """The properties of a schedule."""

    generate: Callable[[Schedule], Iterator[Stage]]
    layouts: tuple[LayoutName, ...]
    """Placements for which it is balanced, or defined at all; the usual one comes first."""
    directions: tuple[Direction, ...] = tuple(Direction)
    """Directions that it has; `plan_for` says what runs in the other one."""
    needs_full_nodes: bool = False
    """It asks for `ranks_per_node`, which must divide the number of ranks."""
    is_sparse: bool = False
    """It sends only what somebody sees. Layers with a window run it, and so does `auto` under masks
    that leave blocks out; under plainly causal masks it must be asked for."""
    gathers: bool = False
    """Each rank computes with the keys of all ranks at once."""
    goes_with_ulysses: bool = False
    """`longctx_patch.compare` tries it over the ranks that Ulysses leaves."""


_RECORDS: dict[str, PlanRecord] = {
    "ring": PlanRecord(generate=ring, layouts=("contiguous", "balanced")),
    "zigzag": PlanRecord(generate=ring, layouts=("zigzag",), goes_with_ulysses=True),
    "zigzag_direct": PlanRecord(generate=direct_ring, layouts=("zigzag",), goes_with_ulysses=True),
    "striped": PlanRecord(generate=ring, layouts=("striped",)),
    "distflash": PlanRecord(generate=partial(distflash, balanced=False), layouts=("contiguous",)),
    "distflash_balanced": PlanRecord(
        generate=partial(distflash, balanced=True), layouts=("contiguous",)
    ),
    "burst": PlanRecord(
        generate=burst_backward,
        layouts=("zigzag", "striped", "balanced"),
        directions=(Direction.BACKWARD,),
    ),
    "double_ring": PlanRecord(
        generate=double_ring,
        layouts=("zigzag", "contiguous", "striped", "balanced"),
        needs_full_nodes=True,
    ),
    "allgather": PlanRecord(
        generate=allgather,
        layouts=("zigzag", "contiguous", "balanced"),
        gathers=True,
        goes_with_ulysses=True,
    ),
    "halo": PlanRecord(
        generate=direct_ring,
        layouts=("zigzag", "contiguous", "striped", "balanced"),
        is_sparse=True,
    ),
}
PLANS: Mapping[str, PlanRecord] = MappingProxyType(_RECORDS)
"""The records, by the names that `LongContextConfig.plan` takes besides `auto`. Where several plans
would do, the first is taken."""

(SPARSE_PLAN,) = (name for name, record in PLANS.items() if record.is_sparse)
"""The plan that layers with a window run, and that `auto` takes if a mask leaves blocks out."""


def plan_for(name: str, direction: Direction, layout: LayoutName) -> str:
    """The plan that runs in `direction` where `name` was asked for.

    A plan that lacks the direction leaves it to the first plan for the layout, which is a ring.
    """
    if name not in PLANS or direction in PLANS[name].directions:
        return name
    return next(n for n, r in PLANS.items() if layout in r.layouts and direction in r.directions)


_IN_A_NODE: Mapping[LayoutName, str] = MappingProxyType(
    {
        "zigzag": "zigzag_direct",
        "contiguous": "distflash_balanced",
        "striped": "striped",
        "balanced": "ring",
    }
)
_HIDES_MESSAGES = 4096
"""The least `rank_tokens * reuse` at which backward's kernels take longer than the messages between
nodes, which then cost nothing."""


def auto_plan(
    direction: Direction,
    layout: LayoutName,
    *,
    num_ranks: int,
    ranks_per_node: int,
    rank_tokens: float,
    reuse: float,
) -> str:
    """The plan that `auto` runs in a direction under a plainly causal mask: a rule, so that no call
    waits for a prediction.

    Where nodes are full a double ring crosses them once for all its ranks, which forward always
    gains from, and backward where messages don't hide behind kernels. Otherwise `burst`, which
    sends queries, serves heads with keys of their own in layouts whose ring waits for key
    gradients. `allgather` has to be asked for: it holds the keys of all ranks, and was no faster
    than a ring in any measurement. tests/planner compares the rule with predictions.

    Args:
        rank_tokens: query tokens of a rank.
        reuse: query heads that are computed with each key-value head that is sent.
    """
    if num_ranks == 1:
        return next(name for name, plan in PLANS.items() if layout in plan.layouts)
    backward, own = direction is Direction.BACKWARD, _IN_A_NODE[layout]
    if layout == "contiguous":
        return own
    crosses = has_full_nodes(num_ranks, ranks_per_node)
    if crosses and not (backward and rank_tokens * reuse >= _HIDES_MESSAGES):
        return "double_ring"
    if backward and reuse == 1 and layout != "zigzag":
        return "burst"
    return "double_ring" if crosses and layout != "zigzag" else own


def has_full_nodes(num_ranks: int, ranks_per_node: int) -> bool:
    """Says whether ring ranks fill several nodes, so that a double ring has both its rings."""
    return 1 < ranks_per_node < num_ranks and num_ranks % ranks_per_node == 0


def make_schedule(
    name: str,
    direction: Direction,
    layout: Layout,
    mask: Mask,
    *,
    num_kv_heads: int,
    ranks_per_node: int | None = None,
) -> Schedule:
    """The schedule that `LongContextConfig.plan` calls `name`, over a layout it is made for.

    `num_kv_heads` are those that each rank computes. Raises ValueError for a name that no plan has,
    a direction that the plan lacks, and nodes that it needs but the ranks don't fill.
    """
    require_choice("plan", name, PLANS)
    record = PLANS[name]
    if direction not in record.directions:
        only = " and ".join(known.value for known in record.directions)
        raise ValueError(f"plan={name!r} for {direction.value}: this plan exists for {only} only.")
    if record.needs_full_nodes and layout.num_ranks % (ranks_per_node or layout.num_ranks + 1):
        raise ValueError(
            f"ranks_per_node={ranks_per_node} with {layout.num_ranks} ranks: {name!r} needs nodes "
            "that are full. Use a divisor of the ranks, or another plan."
        )
    pieces = piece_table(layout, mask)
    return Schedule(name, direction, pieces, record.generate, num_kv_heads, ranks_per_node or 1)
