"""Reads what a batch says about its rows, and makes the mask of a user's function for them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longctx_patch.data.descriptor import Cut, Descriptor
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, within

MaskFactory = Callable[[int], Mask]
"""A function from the length of a padded row to the mask of its layers with full attention."""


@dataclass(frozen=True)
class ShardedRow:
    """Holds what `longctx_shard` says about a batch."""

    documents: Documents
    """The documents of the row (every row of the batch has the same)."""
    real_lengths: tuple[int, ...]
    """Tokens of each row of the batch without its padding."""
    cut: Cut
    """Whose tokens of the row it has."""
    checksum: int
    """A checksum of what all ranks of a group have alike: rows, their documents and padding."""
    most_id: int
    """The largest token of the whole rows."""
    longest: int
    """Tokens of the longest document of all rows."""
    key: bytes
    """Equal for batches of equal rows."""

    @classmethod
    def read(cls, shard: Tensor) -> "ShardedRow":
        """Raises ValueError for a tensor that describes no batch with one mask."""
        shard = shard.cpu()
        cut, length, _, lengths, most_id = said = Descriptor.read(shard)
        if len(lengths) > 1 and any(len(row) > 1 for row in lengths):
            raise ValueError(
                f"a batch of {len(lengths)} packed rows: rows with documents of their own have "
                "masks of their own. Give all rows to one call of SequenceShardCollator, which "
                "joins them, instead of joining its batches."
            )
        return cls(
            Documents.of_row(lengths[0], length),
            tuple(map(sum, lengths)),
            cut,
            said.checksum,
            most_id,
            longest=max((tokens for row in lengths for tokens in row), default=0),
            key=shard.numpy().tobytes(),
        )

    def check_place(self, group: SequenceGroup) -> None:
        """Raise ValueError if its tokens are not those of this rank."""
        config, documents = group.config, self.documents
        name = config.placement_of(documents)
        mine = Cut.of(group.group_rank, config.ulysses_degree, config.ring_degree, name)
        if not mine.is_same_as(self.cut, documents):
            raise ValueError(
                f"the batch was cut for {self.cut}, and the model is patched here as {mine}: its "
                "tokens would be taken for others of the row. Make the collator with "
                "SequenceShardCollator(handle.config, group_rank=handle.group_rank, ...)."
            )

    @property
    def has_padding(self) -> bool:
        return any(length < self.documents.num_tokens for length in self.real_lengths)


def made_mask(factory: MaskFactory, row: ShardedRow) -> Mask:
    """The mask that the user's function makes for a row; ValueError where it makes none."""
    num_tokens = row.documents.num_tokens
    try:
        mask = factory(num_tokens)
    except Exception as error:
        raise ValueError(f"the mask function failed for {num_tokens} tokens: {error!r}") from error
    if not isinstance(mask, Mask) or mask.num_tokens != num_tokens:
        is_mask = isinstance(mask, Mask)
        gave = f"{mask.name!r} over {mask.num_tokens} tokens" if is_mask else repr(mask)[:80]
        raise ValueError(
            f"the mask function gave {gave} for {num_tokens} tokens: it returns a Mask "
            "over as many tokens as it is asked for (longctx_patch.masks makes them)."
        )
    if not (mask.sees_ahead and row.has_padding and row.documents.is_one):
        return mask
    if len(row.real_lengths) > 1:
        raise ValueError(
            "the mask lets tokens see later ones, so they would see the padding of the rows "
            f"({list(row.real_lengths)} of {num_tokens} tokens are real). Use "
            "SequenceShardCollator(packed=True), or rows of equal lengths."
        )
    return mask & within(Documents(row.real_lengths, num_tokens), None)
