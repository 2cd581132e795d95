"""Puts together what all ranks of a group hold of their tokens, in the order of the rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.data.whole_rows import RowsPass
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


class ChosenTokens(NamedTuple):
    """The chosen tokens that one rank holds."""

    mine: Tensor
    """Indices into the rank's `B * L` tokens, int64."""
    places: Tensor
    """The place of each among what was chosen: `row * columns + column`."""


def chosen_tokens(rows: RowsPass, layout: Layout) -> list[ChosenTokens]:
    """For each rank, what it holds of the batch's `rows.columns`, padding left out."""
    assert rows.columns is not None
    owner, local = torch.empty(2, layout.num_tokens, dtype=torch.int64)
    for rank, size in enumerate(layout.sizes):
        held = layout.positions(rank)
        owner[held], local[held] = rank, torch.arange(size)
    found: list[list[tuple[int, int]]] = [[] for _ in layout.sizes]
    before = 0
    for number, (start, stop) in enumerate(rows.spans):
        row, first = (0, before) if rows.is_packed else (number, 0)
        before += stop - start
        for place, column in enumerate(rows.columns, number * len(rows.columns)):
            if start <= column < stop:
                token = first + column - start
                if rows.shared is not None:
                    row, token = 0, int(rows.shared.places[number, column])
                rank = int(owner[token])
                found[rank].append((row * layout.sizes[rank] + int(local[token]), place))
    return [
        ChosenTokens(*torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1))
        for pairs in found
    ]


def all_chosen(mine: Tensor, group: SequenceGroup, rows: RowsPass, layout: Layout) -> Tensor:
    """`[tokens of this rank, ...]` in, `[rows, columns, ...]` out, 0 on padding. Collective.

    Backward is that of `all_tokens`.
    """
    assert rows.columns is not None
    chosen = chosen_tokens(rows, layout)
    parts = group.everyone.all_gather(mine.detach(), [len(rank.mine) for rank in chosen])
    parts[group.group_rank] = own_part(mine, group.num_ranks)
    places = torch.cat([rank.places for rank in chosen]).to(mine.device)
    shape = (len(rows.spans), len(rows.columns))
    whole = mine.new_zeros(shape[0] * shape[1], *mine.shape[1:])
    return whole.index_copy(0, places, torch.cat(parts)).unflatten(0, shape)


def whole_router_logits(
    router_logits: Sequence[Tensor],
    group: SequenceGroup,
    layout: Layout,
    real_lengths: Sequence[int],
    counted: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Router logits of whole sequences, in place of those of this rank's tokens.

    transformers multiplies two means over tokens for each expert (Switch Transformer, eq. 4 to 6,
    https://huggingface.co/papers/2101.03961). The mean over shards of their products is another
    number, so each rank computes the loss of all tokens. Collective: every rank of the group calls
    it, with the same number of layers. Backward sends nothing.

    This rank's own logits get the gradient of `longctx_patch.loss.law.own_part`; those of other
    ranks get none here.

    Args:
        router_logits: `[B * L, E]` for each layer, any float dtype.
        group: the ranks that share the sequences.
        layout: where their tokens are.
        real_lengths: tokens of each row before its padding, the same on every rank.
        counted: places of the tokens of rows that share some, each of which counts once a row.

    Returns:
        `[tokens of all rows, E]` for each layer: row after row, tokens in global order.
    """
    is_real_BN = torch.arange(layout.num_tokens) < torch.tensor(real_lengths)[:, None]
    real = is_real_BN.flatten().nonzero()[:, 0] if counted is None else counted
    return tuple(
        all_tokens(logits.unflatten(0, (len(real_lengths), -1)), group, layout).flatten(0, 1)[
            real.to(logits.device)
        ]
        for logits in router_logits
    )
