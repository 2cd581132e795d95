"""Check every work and transfer of a plan by itself, before the plan is followed."""

from itertools import pairwise

from longctx_patch.plans.types import EVERYONE, Direction, Operand, Plan, Share, Transfer, Work
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.sequence.regions import ANTICAUSAL, CAUSAL, Piece, Tile

_FORWARD = {Operand.KV, Operand.Q, Operand.OUT}
_BACKWARD = set(Operand) - {Operand.Q, Operand.OUT}


def check_form(plan: Plan) -> list[str]:
    """Complaints about ranks, rows, heads, pieces and operands that do not exist."""
    complaints = []
    for number, step in enumerate(plan.steps):
        for work in step.works:
            complaints += [f"work: step {number}: {why}: {work}" for why in _work(plan, work)]
        for transfer in step.transfers:
            complaints += [
                f"transfer: step {number}: {why}: {transfer}" for why in _transfer(plan, transfer)
            ]
    return complaints


def _work(plan: Plan, work: Work) -> list[str]:
    ranks = range(plan.num_ranks)
    if work.rank not in ranks or work.q_owner not in ranks:
        return ["no such rank"]
    if work.kv_owner != EVERYONE and work.kv_owner not in ranks:
        return ["no such rank"]
    rows = plan.layout.sizes[work.q_owner]
    gathered = work.kv_owner == EVERYONE
    columns = plan.layout.num_tokens if gathered else plan.layout.sizes[work.kv_owner]
    if gathered and any(run.step > 1 for rank in plan.layout.intervals for run in rank):
        return ["keys of a striped layout can't be gathered in the order of the tokens"]
    complaints = [] if work.pieces else ["no pieces"]
    if gathered:
        tables = (piece for piece in work.pieces if isinstance(piece.rule, Tile))
        complaints += [
            f"a table over keys of several runs: {piece}"
            for piece in tables
            if len(plan.layout.places(piece.kv)) > 1
        ]
    complaints += [] if _are_heads(work.heads) else ["no such heads"]
    complaints += [why for piece in work.pieces for why in _piece(piece, rows, columns)]
    return complaints


def _piece(piece: Piece, rows: int, columns: int) -> list[str]:
    if not (_is_run(piece.q, rows) and _is_run(piece.kv, columns)):
        return [f"no such rows or columns: {piece}"]
    if piece.rule in (CAUSAL, ANTICAUSAL) and piece.q.size != piece.kv.size:
        return [f"a causal piece is a square: {piece}"]
    if isinstance(piece.rule, Tile) and piece.rule.bits.shape != (piece.q.size, piece.kv.size):
        return [f"a table has a bit for each pair: {piece}"]
    return []


def _transfer(plan: Plan, transfer: Transfer) -> list[str]:
    ranks, block = range(plan.num_ranks), transfer.block
    if not {transfer.source, transfer.destination, block.owner} <= set(ranks):
        return ["no such rank"]
    complaints = []
    if transfer.source == transfer.destination:
        complaints.append("a rank sends to itself")
    if not _are_rows(block.rows, plan.layout.sizes[block.owner]):
        complaints.append("no such rows")
    if not _are_heads(block.heads):
        complaints.append("no such heads")
    if block.operand not in (_FORWARD if plan.direction is Direction.FORWARD else _BACKWARD):
        complaints.append(f"{plan.direction.value} has no {block.operand.value}")
    if block.operand.is_input != (transfer.buffer is not None):
        complaints.append("inputs land in buffers, results don't")
    return complaints


def _are_rows(rows: Rows, size: int) -> bool:
    in_order = all(a.stop < b.start for a, b in pairwise(rows.runs))
    return bool(rows.runs) and in_order and all(_is_run(run, size) for run in rows.runs)


def _is_run(run: Interval, size: int) -> bool:
    return run.step == 1 and 0 <= run.start < run.stop <= size


def _are_heads(heads: Share) -> bool:
    return 0 <= heads.part < heads.parts
