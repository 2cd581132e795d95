"""What all ranks of a group hold of their tokens, put together in the order of the rows."""

from torch import Tensor

from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.loss.law import own_part
from longctx_patch.sequence.layout import Layout


def all_tokens(mine: Tensor, group: SequenceGroup, layout: Layout) -> Tensor:
    """`[B, tokens of this rank, ...]` in, `[B, all tokens, ...]` out. Collective over the group.

    Backward sends nothing: this rank's own tokens get the gradient of
    `longctx_patch.loss.law.own_part`, and those of other ranks get none here.
    """
    num_rows = mine.shape[0]
    sizes = [num_rows * size for size in layout.sizes]
    shards = group.everyone.all_gather(mine.detach().flatten(0, 1), sizes)
    shards[group.group_rank] = own_part(mine, group.num_ranks).flatten(0, 1)
    return layout.unshard([shard.unflatten(0, (num_rows, -1)) for shard in shards], 1)
