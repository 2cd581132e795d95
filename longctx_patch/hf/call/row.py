"""Checks whose tokens a shard has, and makes the mask of a user's function for its rows."""

from collections.abc import Callable

from longctx_patch.data.descriptor import Cut, Descriptor
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, within

MaskFactory = Callable[[int], Mask]
"""A function from the length of a padded row to the mask of its layers with full attention."""


def check_place(row: Descriptor, group: SequenceGroup) -> None:
    """Raise ValueError if a shard's tokens are not those of this rank."""
    config, documents = group.config, row.documents
    name = config.placement_of(documents)
    mine = Cut.of(group.group_rank, config.ulysses_degree, config.ring_degree, name)
    if not mine.is_same_as(row.cut, documents):
        raise ValueError(
            f"the batch was cut for {row.cut}, and the model is patched here as {mine}: its tokens "
            "would be taken for others of the row. Make the collator with "
            "SequenceShardCollator(handle.config, group_rank=handle.group_rank, ...)."
        )


def made_mask(factory: MaskFactory, row: Descriptor) -> Mask:
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
