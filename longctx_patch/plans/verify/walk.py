"""Prove a plan correct before it runs: a symbolic walk, without devices or processes.

Ranks, rows and heads exist and pieces are what kernels compute (`form.py`). Every allowed (query,
key) pair is computed exactly once (`coverage.py`). The walk here checks that a rank uses and sends
only what it holds, that no buffer is overwritten in a step that still reads it, that each
contribution is rounded once at most, and that every partial result is at its owner at the end.
Last, the ranks' programs, side by side, all come to their end (`progress.py`). `verify_plan` raises
`PlanError` with all complaints, each starting with the name of the broken rule.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from longctx_patch.plans.pieces import by_owner, key_contributions, query_contributions
from longctx_patch.plans.types import (
    EVERYONE,
    Block,
    Direction,
    Operand,
    Plan,
    Share,
    Step,
    Transfer,
    Work,
)
from longctx_patch.plans.verify.coverage import check_coverage
from longctx_patch.plans.verify.form import check_form
from longctx_patch.plans.verify.no_deadlock import check_progress
from longctx_patch.sequence.layout import Rows


class PlanError(ValueError):
    """A plan that would give wrong numbers, hang, or read what is not there."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The measures of a walk through a plan."""

    area: int
    """Number of allowed (query, key) pairs."""
    idle_fraction: float
    """Share of rank-time without work, if a step takes as long as its busiest rank's area."""


def verify_plan(plan: Plan) -> PlanReport:
    """Check every rule. Raises `PlanError` with all complaints about a plan that is wrong."""
    # Each check relies on the ones before it.
    complaints = check_form(plan)
    complaints = complaints or [*check_coverage(plan), *_Walk(plan).run()]
    complaints = complaints or check_progress(plan.rank_steps)
    if complaints:
        raise PlanError(
            f"plan {plan.name!r} ({plan.direction.value}, {plan.num_ranks} ranks) is wrong:\n"
            + "\n".join(complaints)
        )
    works = [work for step in plan.steps for work in step.works]
    area = sum(work.area for work in works if work.heads.part == 0)
    return PlanReport(area=area, idle_fraction=_idle_fraction(plan, area))


def _idle_fraction(plan: Plan, area: int) -> float:
    makespan = 0.0
    for step in plan.steps:
        busy: dict[int, float] = {}
        for work in step.works:
            busy[work.rank] = busy.get(work.rank, 0.0) + work.area / work.heads.parts
        makespan += max(busy.values(), default=0.0)
    return 1 - area / (makespan * plan.num_ranks) if makespan else 0.0


class _Walk:
    """Walks the steps and keeps what each rank holds."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.complaints: list[str] = []
        self.buffers: dict[tuple[int, int], Block] = {}
        # (rank, block without its rows) -> buffers of that rank that hold rows of the block
        self.holders: dict[tuple[int, Block], set[int]] = {}
        # (rank, result, owner, heads) -> the partial result at that rank
        self.partials: dict[tuple[int, Operand, int, Share], _Partial] = {}

    def run(self) -> list[str]:
        for number, step in enumerate(self.plan.steps):
            reads = self._check_reads(number, step)
            self._check_overwrites(number, step, reads)
            moved = self._take_partials(number, step)
            self._add_works(step)
            self._land(step, moved)
        self.complaints += [
            f"home: rank {rank} still holds {result.value} of rank {owner}"
            for rank, result, owner, _ in self.partials
            if rank != owner
        ]
        return self.complaints

    def _check_reads(self, number: int, step: Step) -> set[tuple[int, int]]:
        """Check that inputs are there; return the (rank, buffer) pairs that the step reads."""
        forward = self.plan.direction is Direction.FORWARD
        queries = Operand.Q if forward else Operand.Q_BACKWARD
        wanted = [(t.source, t.block) for t in step.transfers if t.block.operand.is_input]
        for work in step.works:
            wanted.append((work.rank, Block(queries, work.q_owner, work.q_rows, work.heads)))
            wanted += [(work.rank, block) for block in self._keys_of(work)]
        reads = set()
        for rank, block in wanted:
            if block.owner == rank:
                continue
            holders = [
                (rank, buffer)
                for buffer in sorted(self.holders.get((rank, _rowless(block)), ()))
                if self.buffers[rank, buffer].rows.covers(block.rows)
            ]
            if not holders:
                self.complaints.append(f"read: step {number}: rank {rank} does not hold {block}")
            reads.update(holders[:1])
        return reads

    def _keys_of(self, work: Work) -> list[Block]:
        """The blocks of keys that a work reads: those of all ranks where it reads gathered keys."""
        if work.kv_owner != EVERYONE:
            return [Block(Operand.KV, work.kv_owner, work.kv_rows, work.heads)]
        return [
            Block(Operand.KV, owner, Rows.first(size), work.heads)
            for owner, size in enumerate(self.plan.layout.sizes)
            if size
        ]

    def _check_overwrites(self, number: int, step: Step, reads: set[tuple[int, int]]) -> None:
        writes = Counter((t.destination, t.buffer) for t in step.transfers if t.buffer is not None)
        for (rank, buffer), count in writes.items():
            where = f"buffer: step {number}: rank {rank}"
            if (rank, buffer) in reads:
                self.complaints.append(f"{where} overwrites buffer {buffer} while reading it")
            if count > 1:
                self.complaints.append(f"{where} has {count} transfers land in buffer {buffer}")

    def _take_partials(self, number: int, step: Step) -> list[tuple[Transfer, "_Partial"]]:
        moved = []
        for transfer in step.transfers:
            operand, owner, rows, heads = transfer.block
            if operand.is_input:
                continue
            partial = self.partials.pop((transfer.source, operand.partial, owner, heads), None)
            if partial is None:
                self.complaints.append(f"read: step {number}: no partial result: {transfer}")
                continue
            if not rows.covers(partial.rows):
                self.complaints.append(f"transfer: step {number}: rows left behind: {transfer}")
            if operand in (Operand.DQ, Operand.DKV) and partial.calls > 1:
                self.complaints.append(
                    f"rounding: step {number}: {partial.calls} contributions in the dtype of the "
                    f"model: {transfer}"
                )
            moved.append((transfer, partial))
        return moved

    def _add_works(self, step: Step) -> None:
        backward = self.plan.direction is Direction.BACKWARD
        result = Operand.DQ if backward else Operand.OUT
        for work in step.works:
            partial = _Partial(work.q_rows, query_contributions(work.pieces))
            self._add((work.rank, result, work.q_owner, work.heads), partial)
            for part in by_owner(work, self.plan.layout) if backward else ():
                partial = _Partial(part.kv_rows, key_contributions(part.pieces))
                self._add((work.rank, Operand.DKV, part.kv_owner, work.heads), partial)

    def _land(self, step: Step, moved: list[tuple[Transfer, "_Partial"]]) -> None:
        for transfer in step.transfers:
            if transfer.buffer is not None:
                self._fill(transfer.destination, transfer.buffer, transfer.block)
        for transfer, partial in moved:
            operand, owner, rows, heads = transfer.block
            arrived = _Partial(rows, partial.calls)  # of all rows that were sent
            self._add((transfer.destination, operand.partial, owner, heads), arrived)

    def _add(self, key: tuple[int, Operand, int, Share], partial: "_Partial") -> None:
        held = self.partials.get(key)
        self.partials[key] = partial if held is None else held.plus(partial)

    def _fill(self, rank: int, buffer: int, block: Block) -> None:
        before = self.buffers.get((rank, buffer))
        if before is not None:
            self.holders[rank, _rowless(before)].discard(buffer)
        self.buffers[rank, buffer] = block
        self.holders.setdefault((rank, _rowless(block)), set()).add(buffer)


class _Partial(NamedTuple):
    """A partial result: the rows that were added to, and the most contributions to one row."""

    rows: Rows
    calls: int

    def plus(self, other: "_Partial") -> "_Partial":
        return _Partial(self.rows | other.rows, self.calls + other.calls)


def _rowless(block: Block) -> Block:
    """The block without its rows, as a key that blocks share which differ in rows alone."""
    return block._replace(rows=Rows(()))
