"""Each plan does what the paper of its name says: who computes and sends what in which step.

The schedules below are written down from the papers, rank by rank, and not taken from the
generators, so a name that stands for another schedule fails. There are P ranks; masks are causal;
`r - s` is modulo P.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest

from longctx_patch import LongContextConfig, Workload, compare
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import (
    EVERYONE,
    AttentionShape,
    Direction,
    Operand,
    Plan,
    Schedule,
    Stage,
    make_schedule,
    plan_traffic,
    verify_plan,
)
from longctx_patch.plans.generators import table
from longctx_patch.plans.generators.direct import direct
from longctx_patch.plans.generators.ring import ring_works
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, PlanRecord, plan_for
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import contiguous, make_layout
from longctx_patch.sequence.masks import causal
from tests.engine.exact import Case, assert_exact
from tests.masked import Masked

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
KV, Q, Q_BACKWARD, OUT = Operand.KV, Operand.Q, Operand.Q_BACKWARD, Operand.OUT
DQ, DKV, DKV_SUM = Operand.DQ, Operand.DKV, Operand.DKV_SUM
NUM_RANKS, HEAD_GROUPS = (2, 3, 4, 6), 2

Works = list[tuple[int, int, int, int]]
"""(step, rank, whose queries, whose keys) of each tile."""
Sends = list[tuple[int, int, int, Operand, int]]
"""(step, from, to, what, whose) of each message."""


def plan_of(
    name: str, direction: Direction, num_ranks: int, *, tokens: int = 16, per_node: int = 2
) -> Plan:
    layout = make_layout(PLANS[name].layouts[0], tokens * num_ranks, ring=num_ranks)
    mask, kv_heads = causal(layout.num_tokens), HEAD_GROUPS
    return make_schedule(
        name, direction, layout, mask, num_kv_heads=kv_heads, ranks_per_node=per_node
    ).plan()


def ring_steps(num_ranks: int, *, sees_later: bool) -> Works:
    """Rank r computes with the keys of r - s in step s; without `sees_later` only if s <= r."""
    return [
        (s, r, r, (r - s) % num_ranks)
        for s in range(num_ranks)
        for r in range(num_ranks)
        if sees_later or s <= r
    ]


def kv_hops(num_ranks: int) -> Sends:
    """In each step but the last, every rank sends the keys that it computes with to the next."""
    return [
        (s, r, (r + 1) % num_ranks, KV, (r - s) % num_ranks)
        for s in range(num_ranks - 1)
        for r in range(num_ranks)
    ]


def zigzag(num_ranks: int, direction: Direction) -> tuple[Works, Sends]:
    """Ring Attention over zigzag or striped shards. In backward each sum of dk and dv follows its
    keys one step behind; its last hop, after the last step, reaches the owner."""
    sums = [
        (s, r, (r + 1) % num_ranks, DKV_SUM, (r - s + 1) % num_ranks)
        for s in range(2, num_ranks + 1)
        for r in range(num_ranks)
    ]
    sends = kv_hops(num_ranks) + (sums if direction is BACKWARD else [])
    return ring_steps(num_ranks, sees_later=True), sends


def ring(num_ranks: int, direction: Direction) -> tuple[Works, Sends]:
    """Ring Attention over contiguous shards: rank r has work in steps 0 to r alone, so sums of
    owner o start at rank o + 1 < P."""
    _, sends = zigzag(num_ranks, direction)
    kept = [s for s in sends if s[3] is KV or s[4] != num_ranks - 1]
    return ring_steps(num_ranks, sees_later=False), kept


def zigzag_direct(num_ranks: int, direction: Direction) -> tuple[Works, Sends]:
    """Owners send keys straight to the ranks that need them, one step before; these send the
    gradients straight back, one step after."""
    works = ring_steps(num_ranks, sees_later=True)
    tiles = [tile for tile in works if tile[0] > 0]
    sends: Sends = [(s - 1, kv, r, KV, kv) for s, r, _, kv in tiles]
    if direction is BACKWARD:
        sends += [(s + 1, r, kv, DKV, kv) for s, r, _, kv in tiles]
    return works, sends


def helped(num_ranks: int, direction: Direction, *, last_is_shared: bool) -> tuple[Works, Sends]:
    """DISTFLASHATTN, section 3.1: rank p >= t computes with the keys of p - t; p < t helps rank
    p - t + P with its own keys. At t = P / 2 both are the same pair of ranks: the owner of the
    queries computes it alone, or (`last_is_shared`) each half of the rows."""
    works: Works = []
    for t in range(num_ranks // 2 + 1):
        for p in range(num_ranks):
            if p >= t:
                works.append((t, p, p, p - t))
            elif 2 * t < num_ranks or last_is_shared:
                works.append((t, p, p - t + num_ranks, p))
    sends: Sends = []
    for t, p, q, kv in works:
        if kv != p:
            sends.append((t - 1, kv, p, KV, kv))
            sends += [(t + 1, p, kv, DKV, kv)] if direction is BACKWARD else []
        if q != p:
            sends.append((t - 1, q, p, Q if direction is FORWARD else Q_BACKWARD, q))
            sends.append((t + 1, p, q, OUT if direction is FORWARD else DQ, q))
    return works, sends


def burst(num_ranks: int, direction: Direction) -> tuple[Works, Sends]:
    """BurstAttention: keys stay; queries go around with all that backward needs of them. In this
    plan each dQ goes straight to its owner, one step after."""
    works = [(s, r, (r - s) % num_ranks, r) for s in range(num_ranks) for r in range(num_ranks)]
    hops = [(s, r, (r + 1) % num_ranks, Q_BACKWARD, q) for s, r, q, _ in works if s < num_ranks - 1]
    returns = [(s + 1, r, q, DQ, q) for s, r, q, _ in works if s]
    return works, hops + returns


def double_ring(num_ranks: int, direction: Direction, per_node: int = 2) -> tuple[Works, Sends]:
    """LoongTrain's double ring: in window w a node computes with blocks of the node w before it,
    which go around inside the node. At the start of a window each block is sent once, to its
    place in the next node. Sums of a window end at their owner's place, then go to the owner."""
    nodes = num_ranks // per_node

    def rank(node: int, place: int) -> int:
        return node % nodes * per_node + place % per_node

    works: Works = []
    sends: Sends = []
    for window, step, me in product(range(nodes), range(per_node), range(num_ranks)):
        node, place = divmod(me, per_node)
        now, owner = window * per_node + step, rank(node - window, place - step)
        works.append((now, me, me, owner))
        if step < per_node - 1:
            sends.append((now, me, rank(node, place + 1), KV, owner))
        if step == 0 and window < nodes - 1:
            sends.append((now, me, rank(node + 1, place), KV, owner))
        if step and direction is BACKWARD:
            sends.append((now + 1, me, rank(node, place + 1), DKV_SUM, owner))
        if step == 0 < window and direction is BACKWARD:
            sends.append((now + per_node + 1, me, owner, DKV_SUM, owner))
    return works, sends


def allgather(num_ranks: int, direction: Direction) -> tuple[Works, Sends]:
    """Llama 3, section 3.3: every rank sends its keys to all, one group of heads ahead. In backward
    the gradients of a group go to their owners one step after."""
    others = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    works: Works = []
    sends: Sends = []
    for group in range(HEAD_GROUPS):
        works += [(group + 1, r, r, EVERYONE) for r in range(num_ranks)]
        sends += [(group, a, b, KV, a) for a, b in others]
        if direction is BACKWARD:
            sends += [(group + 2, a, b, DKV, b) for a, b in others]
    return works, sends


PUBLISHED: dict[str, Callable[[int, Direction], tuple[Works, Sends]]] = {
    "ring": ring,
    "zigzag": zigzag,
    "striped": zigzag,
    "zigzag_direct": zigzag_direct,
    "halo": zigzag_direct,
    "distflash": partial(helped, last_is_shared=False),
    "distflash_balanced": partial(helped, last_is_shared=True),
    "burst": burst,
    "double_ring": double_ring,
    "allgather": allgather,
}
DIRECTED = [
    (name, direction)
    for name in PUBLISHED
    for direction in Direction
    if (name, direction) != ("burst", FORWARD)
]


def check(plan: Plan, expected: tuple[Works, Sends]) -> None:
    verify_plan(plan)
    works, sends = expected
    assert sorted(works) == sorted(
        (number, work.rank, work.q_owner, work.kv_owner)
        for number, step in enumerate(plan.steps)
        for work in step.works
    )
    assert Counter(sends) == Counter(
        (number, source, destination, block.operand, block.owner)
        for number, step in enumerate(plan.steps)
        for source, destination, block, _ in step.transfers
    )


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize(("name", "direction"), DIRECTED)
def test_who_computes_and_sends_what_when(name: str, direction: Direction, num_ranks: int) -> None:
    if name != "double_ring" or num_ranks % 2 == 0:
        check(plan_of(name, direction, num_ranks), PUBLISHED[name](num_ranks, direction))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("num_ranks", "per_node"), [(3, 3), (6, 3), (8, 4), (9, 3)])
def test_the_double_ring_of_other_nodes(
    direction: Direction, num_ranks: int, per_node: int
) -> None:
    plan = plan_of("double_ring", direction, num_ranks, per_node=per_node)
    check(plan, double_ring(num_ranks, direction, per_node))


@pytest.mark.parametrize(
    ("names", "direction", "fixed", "per_query_head"),
    [
        (("ring", "zigzag", "striped", "double_ring", "allgather"), FORWARD, 14, 0),
        (("zigzag_direct", "halo"), FORWARD, 10.5, 0),  # 3/4: only what somebody needs
        (("distflash",), FORWARD, 5.5, 1.5),
        (("distflash_balanced",), FORWARD, 5.5, 2),
        (("zigzag", "striped", "double_ring"), BACKWARD, 14 + 28, 0),  # sums are in float32
        (("ring",), BACKWARD, 14 + 24.5, 0),  # nobody adds to the last rank's sum but itself
        (("zigzag_direct", "halo"), BACKWARD, 2 * 10.5, 0),
        (("distflash",), BACKWARD, 11, 2.25),
        (("distflash_balanced",), BACKWARD, 11, 3),
        (("burst",), BACKWARD, 0, 14 + 5.25),
        (("allgather",), BACKWARD, 14 + 10.5, 0),
    ],
)
@pytest.mark.parametrize("group", [1, 4])
def test_bytes_on_8_ranks(
    names: tuple[str, ...], direction: Direction, fixed: float, per_query_head: float, group: int
) -> None:
    """Mean bytes sent per rank, in units of one rank's keys, with `group` query heads per key-value
    head. Tokens and dims are so many that lse, delta and diagonals don't count."""
    tokens, head_dim = 512, 4096
    shape = AttentionShape(
        batch=1,
        num_heads=HEAD_GROUPS * group,
        num_kv_heads=HEAD_GROUPS,
        head_dim=head_dim,
        itemsize_bytes=2,
    )
    for name in names:
        sent = plan_traffic(plan_of(name, direction, 8, tokens=tokens), shape)
        mean = sum(traffic.bytes for traffic in sent) / 8
        units = mean / (tokens * head_dim * HEAD_GROUPS * 2)
        assert units == pytest.approx(fixed + group * per_query_head, rel=2e-3), name


def test_what_names_stand_for_beside_their_schedules() -> None:
    def named(has: Callable[[PlanRecord], bool]) -> set[str]:
        return {name for name, record in PLANS.items() if has(record)}

    assert all(PLANS[name].layouts == (name,) for name in ("zigzag", "striped"))
    assert named(lambda plan: plan.needs_full_nodes) == {"double_ring"}
    assert named(lambda plan: plan.is_sparse) == {SPARSE_PLAN} == {"halo"}
    assert named(lambda plan: plan.directions == (BACKWARD,)) == {"burst"}
    assert {layout: plan_for("burst", FORWARD, layout) for layout in PLANS["burst"].layouts} == {
        "zigzag": "zigzag",
        "striped": "striped",
        "balanced": "ring",
    }


def test_names_that_no_plan_has_are_refused() -> None:
    layout, mask = contiguous(8, 4), causal(8)
    with pytest.raises(ValueError, match=r"plan='zigzag_ring': choose .* Did you mean 'zigzag'\?"):
        make_schedule("zigzag_ring", FORWARD, layout, mask, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"plan='burst' for forward: .* for backward only"):
        make_schedule("burst", FORWARD, layout, mask, num_kv_heads=1)
    for per_node in (3, None):
        with pytest.raises(ValueError, match=f"ranks_per_node={per_node} with 4 ranks: .* full"):
            make_schedule(
                "double_ring", FORWARD, layout, mask, num_kv_heads=1, ranks_per_node=per_node
            )


def all_at_once(schedule: Schedule) -> Iterator[Stage]:
    """A schedule of one exchange: all keys that a rank needs arrive while it uses its own."""
    steps = [ring_works(schedule.pieces, step) for step in range(schedule.num_ranks)]
    return direct(schedule, iter([steps[:1], steps[1:]]))


def test_a_record_is_all_that_a_new_plan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    record = PlanRecord(generate=all_at_once, layouts=("contiguous",))
    monkeypatch.setitem(table._RECORDS, "all_at_once", record)
    with pytest.raises(ValueError, match="made for layout='contiguous'"):
        LongContextConfig(plan="all_at_once", layout="zigzag")
    config = LongContextConfig(ring_degree=3, plan="all_at_once")
    assert config.placement == "contiguous"
    for direction in Direction:
        plan = plan_of("all_at_once", direction, 3)
        assert verify_plan(plan).area == 48 * 49 // 2
    q, k = np.arange(48)[:, None], np.arange(48)
    assert_exact(Case(config, Masked("new", Documents.one(48), None, None, k <= q)))
    rows = compare(Workload(num_tokens=48, num_heads=3, num_kv_heads=3), MACHINES["h100"], 3).rows
    directions = {r.prediction.direction for r in rows if r.prediction.plan == "all_at_once"}
    assert directions == {*Direction}
