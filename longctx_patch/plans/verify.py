"""Prove a plan right before it runs: a symbolic walk through its steps, no device, no processes.

The walk checks that every allowed (query, key) pair is computed exactly once, that a rank uses
and sends only what it holds, that no buffer is overwritten in a step that still reads it, and
that every partial gradient is at its owner at the end. `verify_plan` raises `PlanError` with all
complaints, each starting with the name of the broken rule.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from longctx_patch.layout import Interval, Layout, slots_of
from longctx_patch.masks import Mask, Piece
from longctx_patch.plans.gathered import by_owner
from longctx_patch.plans.types import (
    Block,
    Direction,
    Operand,
    Plan,
    Share,
    Step,
    Transfer,
    Work,
)


class PlanError(ValueError):
    """A plan that would give wrong numbers, hang, or read what is not there."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What the walk measured."""

    area: int
    """Allowed (query, key) pairs."""
    idle_fraction: float
    """Share of rank-time without work, if a step takes as long as its busiest rank's area."""
    messages: tuple[int, ...]
    """Messages sent by each rank."""
    links: dict[tuple[int, int], int]
    """Messages of each (source, destination)."""


def verify_plan(plan: Plan) -> PlanReport:
    """Check every rule; return the report or raise `PlanError`."""
    complaints = [*_check_coverage(plan), *_Walk(plan).run()]
    if complaints:
        raise PlanError(
            f"plan {plan.name!r} ({plan.direction.value}, {plan.num_ranks} ranks) is wrong:\n"
            + "\n".join(complaints)
        )
    transfers = [transfer for step in plan.steps for transfer in step.transfers]
    links = Counter((transfer.source, transfer.destination) for transfer in transfers)
    sent = Counter(transfer.source for transfer in transfers)
    works = [work for step in plan.steps for work in step.works]
    area = sum(work.area for work in works if work.heads.part == 0)
    return PlanReport(
        area=area,
        idle_fraction=_idle_fraction(plan, area),
        messages=tuple(sent[rank] for rank in range(plan.num_ranks)),
        links=dict(links),
    )


def _idle_fraction(plan: Plan, area: int) -> float:
    makespan = 0.0
    for step in plan.steps:
        busy: dict[int, float] = {}
        for work in step.works:
            busy[work.rank] = busy.get(work.rank, 0.0) + work.area / work.heads.parts
        makespan += max(busy.values(), default=0.0)
    return 1 - area / (makespan * plan.num_ranks) if makespan else 0.0


def _check_coverage(plan: Plan) -> list[str]:
    """Every allowed pair of every head once: pieces are allowed, disjoint, and as large."""
    pieces: dict[Share, dict[tuple[int, int], list[Piece]]] = {}
    for work in (part for s in plan.steps for w in s.works for part in by_owner(w, plan.layout)):
        of_pair = pieces.setdefault(work.heads, {}).setdefault((work.q_owner, work.kv_owner), [])
        of_pair.extend(work.pieces)
    parts = max((heads.parts for heads in pieces), default=1)
    wanted = {Share(part, parts) for part in range(parts)}
    if pieces and set(pieces) != wanted:
        return [f"coverage: heads {sorted(pieces)} computed of {sorted(wanted)}"]
    complaints = []
    for heads in wanted:
        complaints += _check_pairs(plan, heads, pieces.get(heads, {}))
    return complaints


def _check_pairs(
    plan: Plan, heads: Share, pieces: Mapping[tuple[int, int], list[Piece]]
) -> list[str]:
    complaints = []
    for q_owner in range(plan.num_ranks):
        for kv_owner in range(plan.num_ranks):
            here = pieces.get((q_owner, kv_owner), [])
            where = f"coverage: queries of rank {q_owner}, keys of rank {kv_owner}"
            if heads.parts > 1:
                where += f", heads {heads.part} of {heads.parts}"
            complaints += [
                f"{where}: {piece} is not allowed by the mask"
                for piece in here
                if not _is_allowed(piece, plan.layout, plan.mask, q_owner, kv_owner)
            ]
            complaints += [
                f"{where}: {a} and {b} overlap"
                for i, a in enumerate(here)
                for b in here[i + 1 :]
                if a.q.intersect(b.q).size and a.kv.intersect(b.kv).size
            ]
            wanted = _allowed_area(plan.layout, plan.mask, q_owner, kv_owner)
            computed = sum(piece.area for piece in here)
            if computed != wanted:
                complaints.append(f"{where}: {computed} pairs computed of {wanted} allowed")
    return complaints


def _allowed_area(layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> int:
    return sum(
        mask.area(q, kv) for q in layout.intervals[q_owner] for kv in layout.intervals[kv_owner]
    )


def _is_allowed(piece: Piece, layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> bool:
    """Cut the piece where its tokens are not contiguous and ask the mask about each part."""
    q_pairs, kv_pairs = slots_of(layout.intervals[q_owner]), slots_of(layout.intervals[kv_owner])
    rows = _cut_points(piece.q, q_pairs)
    columns = _cut_points(piece.kv, kv_pairs)
    if piece.causal:
        rows = columns = sorted({*rows, *columns})
    for row in (Interval(a, b) for a, b in pairwise(rows)):
        for column in (Interval(a, b) for a, b in pairwise(columns)):
            if piece.causal and column.start > row.start:
                continue
            q = _tokens(row.shift(piece.q.start), q_pairs)
            kv = _tokens(column.shift(piece.kv.start), kv_pairs)
            if q is None or kv is None:
                return False
            if piece.causal and column == row:
                square = Interval(0, row.size)
                if mask.pieces(q, kv) != (Piece(square, square, causal=True),):
                    return False
            elif mask.area(q, kv) != q.size * kv.size:
                return False
    return True


def _cut_points(rows: Interval, pairs: list[tuple[Interval, Interval]]) -> list[int]:
    """Edges of the runs of contiguous tokens inside `rows`, relative to its start."""
    edges = {edge for _, slots in pairs for edge in slots[:2]}
    inner = {edge - rows.start for edge in edges if rows.start < edge < rows.stop}
    return sorted({0, rows.size} | inner)


def _tokens(rows: Interval, pairs: list[tuple[Interval, Interval]]) -> Interval | None:
    for tokens, slots in pairs:
        if slots.start <= rows.start and rows.stop <= slots.stop:
            return tokens.part(rows.shift(-slots.start))
    return None


class _Walk:
    """Walks the steps and keeps what each rank holds."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.complaints: list[str] = []
        self.buffers: dict[tuple[int, int], Block] = {}
        # (rank, result, owner, heads) -> works that the partial result at that rank is made of
        self.partials: dict[tuple[int, Operand, int, Share], list[Work]] = {}

    def run(self) -> list[str]:
        for number, step in enumerate(self.plan.steps):
            for transfer in step.transfers:
                self._check_transfer(number, transfer)
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

    def _check_transfer(self, number: int, transfer: Transfer) -> None:
        where = f"transfer: step {number}"
        ranks = range(self.plan.num_ranks)
        if transfer.source not in ranks or transfer.destination not in ranks:
            self.complaints.append(f"{where}: no such rank: {transfer}")
        if transfer.source == transfer.destination:
            self.complaints.append(f"{where}: a rank sends to itself: {transfer}")
        rows = transfer.block.rows
        if not 0 <= rows.start < rows.stop <= self.plan.layout.sizes[transfer.block.owner]:
            self.complaints.append(f"{where}: no such rows: {transfer}")
        if transfer.block.operand.is_input != (transfer.buffer is not None):
            self.complaints.append(f"{where}: inputs land in buffers, results don't: {transfer}")

    def _check_reads(self, number: int, step: Step) -> set[tuple[int, int]]:
        """Check that inputs are there; return the (rank, buffer) pairs that the step reads."""
        forward = self.plan.direction is Direction.FORWARD
        queries = Operand.Q if forward else Operand.Q_BACKWARD
        wanted = [(t.source, t.block) for t in step.transfers if t.block.operand.is_input]
        for work in step.works:
            wanted.append((work.rank, Block(queries, work.q_owner, work.q_rows, work.heads)))
            wanted += [
                (work.rank, Block(Operand.KV, part.kv_owner, part.kv_rows, part.heads))
                for part in by_owner(work, self.plan.layout)
            ]
        reads = set()
        for rank, block in wanted:
            if block.owner == rank:
                continue
            holders = [
                key for key, held in self.buffers.items() if key[0] == rank and _holds(held, block)
            ]
            if not holders:
                self.complaints.append(f"read: step {number}: rank {rank} does not hold {block}")
            reads.update(holders[:1])
        return reads

    def _check_overwrites(self, number: int, step: Step, reads: set[tuple[int, int]]) -> None:
        writes = Counter((t.destination, t.buffer) for t in step.transfers if t.buffer is not None)
        for (rank, buffer), count in writes.items():
            where = f"buffer: step {number}: rank {rank}"
            if (rank, buffer) in reads:
                self.complaints.append(f"{where} overwrites buffer {buffer} while reading it")
            if count > 1:
                self.complaints.append(f"{where} has {count} transfers land in buffer {buffer}")

    def _take_partials(self, number: int, step: Step) -> list[tuple[Transfer, list[Work]]]:
        moved = []
        for transfer in step.transfers:
            operand, owner, rows, heads = transfer.block
            if operand.is_input:
                continue
            works = self.partials.pop((transfer.source, operand.partial, owner, heads), [])
            if not works:
                self.complaints.append(f"read: step {number}: no partial result: {transfer}")
            if any(not _inside(_result_rows(operand, work), rows) for work in works):
                self.complaints.append(f"transfer: step {number}: rows left behind: {transfer}")
            calls = sum(len(work.pieces) for work in works)
            if operand in (Operand.DQ, Operand.DKV) and calls > 1:
                self.complaints.append(
                    f"rounding: step {number}: {calls} contributions in the dtype of the model: "
                    f"{transfer}"
                )
            moved.append((transfer, works))
        return moved

    def _add_works(self, step: Step) -> None:
        backward = self.plan.direction is Direction.BACKWARD
        for work in step.works:
            query_result = Operand.DQ if backward else Operand.OUT
            self._add(work.rank, query_result, work.q_owner, [work])
            for part in by_owner(work, self.plan.layout) if backward else ():
                self._add(work.rank, Operand.DKV, part.kv_owner, [part])

    def _land(self, step: Step, moved: list[tuple[Transfer, list[Work]]]) -> None:
        for transfer in step.transfers:
            if transfer.buffer is not None:
                self.buffers[transfer.destination, transfer.buffer] = transfer.block
        for transfer, works in moved:
            block = transfer.block
            self._add(transfer.destination, block.operand.partial, block.owner, works)

    def _add(self, rank: int, result: Operand, owner: int, works: list[Work]) -> None:
        for work in works:
            self.partials.setdefault((rank, result, owner, work.heads), []).append(work)


def _result_rows(operand: Operand, work: Work) -> Interval:
    return work.kv_rows if operand.partial is Operand.DKV else work.q_rows


def _inside(inner: Interval, outer: Interval) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _holds(held: Block, wanted: Block) -> bool:
    return held._replace(rows=wanted.rows) == wanted and _inside(wanted.rows, held.rows)
