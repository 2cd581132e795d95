"""The ranks of a group compare their batches before anything is sent that could hang."""

from typing import NamedTuple

from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.sequence.documents import Documents
from longctx_patch.transport.meeting import Meeting, SequenceParallelismError


class Held(NamedTuple):
    """What must be the same on all ranks before a forward pass."""

    checksum: int
    """Of the documents and their padding."""
    num_rows: int
    training: bool
    grad_enabled: bool
    num_valid_tokens: int | None
    mask: int
    """The checksum of the mask; 0: none was given."""
    router_logits: bool
    watched: bool
    """Whether the first step is checked."""

    def __str__(self) -> str:
        count = "" if self.num_valid_tokens is None else f", num_valid_tokens {self[4]}"
        return (
            f"{self.num_rows} rows, checksum {self.checksum:08x}, "
            f"{'training' if self.training else 'evaluating'}, "
            f"gradients {'on' if self.grad_enabled else 'off'}, mask {self.mask:08x}, "
            f"router logits {'on' if self.router_logits else 'off'}, "
            f"first step {'now' if self.watched else 'done or not training'}{count}"
        )


def agree(
    group: SequenceGroup,
    documents: Documents,
    held: Held,
    local_tokens: int,
    whole_layers: int,
    problem: ValueError | SequenceParallelismError | None,
) -> int:
    """The least `whole_layers` of all ranks: how many layers can go without recompute. Collective.

    Args:
        local_tokens: how many tokens this rank holds; ranks differ as the layout says.
        whole_layers: how many layers this rank can leave without recompute.
        problem: what this rank alone knows to be wrong, with attention or the batch.

    Raises:
        SequenceParallelismError: on every rank, where one brings such a problem.
        ValueError: on every rank, unless all hold shards of one batch, and each holds a token.
    """
    rows = group.require_shards(
        Meeting.BATCH,
        documents,
        local_tokens,
        str(held),
        (whole_layers,),
        problem=problem,
        whole="the same batch",
        fix="Feed every rank of the group the same rows (same sampler and seed; "
        "dispatch_batches=False) through SequenceShardCollator.",
    )
    if not min(group.layout(documents).sizes):
        raise ValueError(
            f"{documents.num_tokens} tokens over {group.num_ranks} ranks leaves a rank without "
            "tokens, which a model can't compute. Pad the rows; SequenceShardCollator does."
        )
    return min(layers for (layers,) in rows)
