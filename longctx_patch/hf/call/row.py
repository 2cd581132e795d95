"""What a batch says about its rows, and the mask that a user's function makes for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longctx_patch.data.descriptor import Cut, Descriptor
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, within

MaskFactory = Callable[[int], Mask]
"""A function from the length of a padded row to the mask of its layers with full attention."""


@dataclass(frozen=True)
class ShardedRow:
    """What `longctx_shard` says about a batch."""

    documents: Documents
    """The documents of the row (every row of the batch has the same)."""
    real_lengths: tuple[int, ...]
    """Tokens of each row of the batch without its padding."""
    cut: Cut | None = None
    """Whose tokens of the row it has; None if that can't be read."""
    checksum: int = 0
    """A checksum of what all ranks of a group have alike: rows, their documents and padding."""
    most_id: int = 0
    """The largest token of the whole rows."""
    longest: int = 0
    """Tokens of the longest document of all rows."""
    problem: str | None = None
    """What makes the batch unusable, in words."""

    @classmethod
    def read(cls, shard: Tensor) -> "ShardedRow":
        try:
            cut, length, _, lengths, most_id = said = Descriptor.read(shard)
        except ValueError as error:  # the other ranks must learn of it, not wait
            return cls(Documents.one(1), (1,), problem=str(error))
        documents = Documents.of_row(lengths[0], length)
        problem = None
        if len(lengths) > 1 and any(len(row) > 1 for row in lengths):
            problem = (
                f"a batch of {len(lengths)} packed rows: rows with documents of their own have "
                "masks of their own. Give all rows to one call of SequenceShardCollator, which "
                "joins them, instead of joining its batches."
            )
        longest = max((tokens for row in lengths for tokens in row), default=0)
        real = tuple(map(sum, lengths))
        return cls(documents, real, cut, said.checksum, most_id, longest, problem)

    def placed(self, group: SequenceGroup) -> "ShardedRow":
        """The same, with the problem that its tokens are not those of this rank, if they aren't."""
        config, documents = group.config, self.documents
        name = config.placement_of(documents)
        mine = Cut.of(group.group_rank, config.ulysses_degree, config.ring_degree, name)
        if self.problem or self.cut is None or mine.is_same_as(self.cut, documents):
            return self
        problem = (
            f"the batch was cut for {self.cut}, and the model is patched here as {mine}: its "
            "tokens would be taken for others of the row. Make the collator with "
            "SequenceShardCollator(handle.config, group_rank=handle.group_rank, ...)."
        )
        return replace(self, problem=problem)

    @property
    def has_padding(self) -> bool:
        return any(length < self.documents.num_tokens for length in self.real_lengths)


def made_mask(factory: MaskFactory, row: ShardedRow) -> tuple[Mask | None, str | None]:
    """(mask that the user's function makes for a row, problem in words); one of them is None."""
    num_tokens = row.documents.num_tokens
    try:
        mask = factory(num_tokens)
    except Exception as error:  # it may fail on one rank: the others must learn of it, not wait
        return None, f"the mask function failed for {num_tokens} tokens: {error!r}"
    if not isinstance(mask, Mask) or mask.num_tokens != num_tokens:
        is_mask = isinstance(mask, Mask)
        gave = f"{mask.name!r} over {mask.num_tokens} tokens" if is_mask else repr(mask)[:80]
        return None, (
            f"the mask function gave {gave} for {num_tokens} tokens: it returns a Mask "
            "over as many tokens as it is asked for (longctx_patch.masks makes them)."
        )
    if not (mask.sees_ahead and row.has_padding and row.documents.is_one):
        return mask, None
    if len(row.real_lengths) > 1:
        return None, (
            "the mask lets tokens see later ones, so they would see the padding of the rows "
            f"({list(row.real_lengths)} of {num_tokens} tokens are real). Use "
            "SequenceShardCollator(packed=True), or rows of equal lengths."
        )
    return mask & within(Documents(row.real_lengths, num_tokens), None), None
