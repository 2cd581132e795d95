"""Messages and bytes of Ulysses' exchanges of heads for tokens, in closed form."""

from collections.abc import Sequence

from longctx_patch.plans.head_split import Heads, HeadSplit
from longctx_patch.plans.traffic import Traffic


def to_heads_traffic(
    split: HeadSplit, heads: Sequence[Heads], rank: int, *, tokens: int, bytes_per_head: int
) -> Traffic:
    """The traffic of one rank that gets all ranks' tokens of its own heads.

    Args:
        split: the heads that each rank of the Ulysses group computes.
        heads: the kinds of heads of the tensors that travel together.
        rank: the sender's rank in the Ulysses group.
        tokens: the sender's tokens.
        bytes_per_head: bytes of one token's head, over the batch.
    """
    sizes = [
        tokens * bytes_per_head * sum(split.of(kind)[other].size for kind in heads)
        for other in range(split.degree)
        if other != rank
    ]
    return _total(sizes)


def to_tokens_traffic(
    split: HeadSplit,
    heads: Sequence[Heads],
    rank: int,
    *,
    sizes: Sequence[int],
    bytes_per_head: int,
) -> Traffic:
    """The traffic of one rank on the way back; `sizes` are the tokens of each rank of the group."""
    mine = sum(split.of(kind)[rank].size for kind in heads)
    return _total(
        [size * bytes_per_head * mine for other, size in enumerate(sizes) if other != rank]
    )


def _total(sizes: Sequence[int]) -> Traffic:
    return Traffic(sum(1 for size in sizes if size), sum(sizes))
