"""Plans in which every block goes straight from its owner to whoever computes with it.

Inputs travel one step before they are used and results one step after, so each transfer has the
length of one step to hide in. A generator only says who computes what when.
"""

from collections import Counter
from collections.abc import Sequence

from longctx_patch.layout import Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.types import Block, Direction, Operand, Plan, Step, Transfer, Work


def direct_plan(
    name: str,
    direction: Direction,
    layout: Layout,
    mask: Mask,
    works: Sequence[Sequence[Work]],
) -> Plan:
    """The plan that computes `works[step]` in each step. The first step's works must be local."""
    works = [[work for work in step if work.pieces] for step in works]
    transfers: list[list[Transfer]] = [[] for _ in range(len(works) + 1)]
    arrivals: Counter[tuple[int, int]] = Counter()
    for number, step in enumerate(works):
        for work in step:
            for block in _inputs(work, direction):
                assert number > 0, "nothing can arrive before the first step"
                # Blocks that arrive during one step are read in the next, while others arrive.
                buffer = 2 * arrivals[number - 1, work.rank] + number % 2
                arrivals[number - 1, work.rank] += 1
                transfers[number - 1].append(Transfer(block.owner, work.rank, block, buffer))
            transfers[number + 1] += [
                Transfer(work.rank, block.owner, block, buffer=None)
                for block in _results(work, direction)
            ]
    steps = [
        Step(tuple(sent), tuple(computed))
        for sent, computed in zip(transfers, [*works, []], strict=True)
    ]
    if not steps[-1].transfers:
        steps.pop()
    return Plan(name, direction, layout, mask, tuple(steps))


def _inputs(work: Work, direction: Direction) -> list[Block]:
    """What the computing rank does not have by itself."""
    blocks = []
    if work.kv_owner != work.rank:
        blocks.append(Block(Operand.KV, work.kv_owner, work.kv_rows))
    if work.q_owner != work.rank:
        operand = Operand.Q if direction is Direction.FORWARD else Operand.Q_BACKWARD
        blocks.append(Block(operand, work.q_owner, work.q_rows))
    return blocks


def _results(work: Work, direction: Direction) -> list[Block]:
    """What belongs to others."""
    several = len(work.pieces) > 1
    blocks = []
    if work.q_owner != work.rank:
        gradient = Operand.DQ_SUM if several else Operand.DQ
        operand = Operand.OUT if direction is Direction.FORWARD else gradient
        blocks.append(Block(operand, work.q_owner, work.q_rows))
    if work.kv_owner != work.rank and direction is Direction.BACKWARD:
        operand = Operand.DKV_SUM if several else Operand.DKV
        blocks.append(Block(operand, work.kv_owner, work.kv_rows))
    return blocks
