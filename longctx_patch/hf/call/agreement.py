"""The ranks of a group compare what they hold before anything is sent that could hang."""

from typing import NamedTuple

from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.meeting import Meeting, SequenceParallelismError, meet
from longctx_patch.sequence.documents import Documents


class Facts(NamedTuple):
    """What ranks compare before a forward pass; all but two must be equal."""

    num_tokens: int
    checksum: int
    num_rows: int
    local_tokens: int
    """Differ as the layout says."""
    whole_layers: int
    """How many layers this rank can leave without recompute; the least holds for all."""
    training: int
    grad_enabled: int
    num_valid_tokens: int
    mask: int
    router_logits: int
    watched: int
    """Whether the first step is checked."""
    misfired: int
    """Whether attention has not run as planned before."""
    accepted: int


def agree(
    group: SequenceGroup,
    documents: Documents,
    mine: Facts,
    *,
    misfire: str | None,
    problem: str | None,
) -> int:
    """Raise on every rank unless all hold shards of one batch, before anything is sent.

    Returns the least `whole_layers`.

    `misfire` and `problem`: what this rank alone knows to be wrong, with attention and the batch.
    """
    rows = [Facts(*row) for row in meet(group, Meeting.BATCH, mine)]
    misfired = [rank for rank, row in enumerate(rows) if row.misfired]
    if misfired:
        raise SequenceParallelismError(misfire or f"see the error of rank {misfired[0]}")
    if problem is not None:
        raise ValueError(problem)
    sizes = group.layout(documents).sizes
    same = {_alike(row) for row in rows} == {_alike(mine)}
    if same and tuple(row.local_tokens for row in rows) == sizes:
        if min(sizes):
            return min(row.whole_layers for row in rows)
        raise ValueError(
            f"{mine.num_tokens} tokens over {group.num_ranks} ranks leaves a rank without tokens, "
            "which a model can't compute. Pad the rows; SequenceShardCollator does."
        )
    table = "\n".join(_describe(rank, row) for rank, row in enumerate(rows))
    raise ValueError(
        f"the {group.num_ranks} ranks of a sequence group must hold shards of the same batch:\n"
        f"{table}\nThe {group.config.placement_of(documents)} layout of {mine.num_tokens} tokens "
        f"in {len(documents.lengths)} documents gives the ranks "
        f"{list(sizes)}. Feed every rank of the group the same rows (same sampler and seed; "
        "dispatch_batches=False) through SequenceShardCollator."
    )


def _alike(row: Facts) -> Facts:
    return row._replace(local_tokens=0, whole_layers=0)


def _describe(rank: int, row: Facts) -> str:
    if not row.accepted:
        return f"  rank {rank}: it refused its batch, its own error says why"
    count = "" if row.num_valid_tokens < 0 else f", num_valid_tokens {row.num_valid_tokens}"
    return (
        f"  rank {rank}: {row.local_tokens} of {row.num_tokens} tokens, {row.num_rows} rows, "
        f"checksum {row.checksum:08x}, {'training' if row.training else 'evaluating'}, "
        f"gradients {'on' if row.grad_enabled else 'off'}, mask {row.mask:08x}, "
        f"router logits {'on' if row.router_logits else 'off'}, "
        f"first step {'now' if row.watched else 'done or not training'}{count}"
    )
