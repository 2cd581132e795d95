"""A short causal convolution over the segments of a chain, which hand on their last tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longctx_patch.engine.chain.chain_run import ChainRun, checked_tails
from longctx_patch.engine.chain.extents import MOST_UNSIGNED_PLACES, extent
from longctx_patch.engine.chain.hand_over import hand_over

Convolution = Callable[[Tensor, Tensor | None], Tensor]
"""`[B, C, L]` to `[B, C, L]`: each output is of its own token and of the `reach` tokens before it,
of which the last argument `[B, C, reach]` has those before the first one. None: zeros."""


def run_convolution(run: ChainRun, convolve: Convolution, hidden_BCL: Tensor, reach: int) -> Tensor:
    """`convolve` of this rank's tokens, each document by itself. Collective over ranks that share
    documents.

    Before a document that is no branch are zeros, as the convolution pads. Several segments are
    convolved in one call, with what others hold of the `reach` tokens before each in front of it.
    """
    chain, needs = run.chain, checked_tails(run.chain, reach)
    mine = chain.of_rank(run.rank)
    of_token = hidden_BCL.shape[0] * hidden_BCL.shape[1]
    sizes = {
        number: of_token * min(reach, segment.tokens.size)
        for number, segment in enumerate(chain.segments)
    }
    exchange = run.exchange(needs, sizes, hidden_BCL.dtype, learns=hidden_BCL.requires_grad)
    wanted = {number for needed in needs for number in needed}
    tails = {
        number: _last(hidden_BCL, chain.segments[number].slots.stop, sizes[number])
        for number in mine
        if number in wanted
    }
    foreign, (hidden_BCL,) = hand_over(exchange, tails, (hidden_BCL,))
    tails |= foreign

    def before(number: int) -> Tensor | None:
        found = [tails[other].view(*hidden_BCL.shape[:2], -1) for other in needs[number]]
        if not found:
            return None
        zeros = hidden_BCL.new_zeros(*hidden_BCL.shape[:2], reach)
        return torch.cat([zeros, *found], dim=2)[:, :, -reach:]

    if len(mine) == 1:
        return convolve(hidden_BCL, before(mine[0]))
    tokens = hidden_BCL.split([chain.segments[number].slots.size for number in mine], dim=2)
    parts: list[Tensor] = []
    for number, own in zip(mine, tokens, strict=True):
        filled = before(number)
        parts += [own.new_zeros(*own.shape[:2], reach) if filled is None else filled, own]
    out = convolve(in_a_row(parts), None)
    return in_a_row(out.split([part.shape[2] for part in parts], dim=2)[1::2])


def in_pieces(convolve: Convolution, reach: int) -> Convolution:
    """The same convolution, also of more numbers than its kernel can count places of.

    Those it is called for row by row, a piece of the tokens at a time, each with the tokens before
    it. Gradients come in the same pieces, which no batch sets apart.
    """

    def run(hidden_BCL: Tensor, before_BCR: Tensor | None) -> Tensor:
        if extent(hidden_BCL) <= MOST_UNSIGNED_PLACES:
            return convolve(hidden_BCL, before_BCR)
        rows = hidden_BCL.split(1)
        befores = [None] * len(rows) if before_BCR is None else before_BCR.split(1)
        outs = [of_row(row, before) for row, before in zip(rows, befores, strict=True)]
        return torch.cat([out.transpose(1, 2) for out in outs]).transpose(1, 2)

    def of_row(row_1CL: Tensor, before: Tensor | None) -> Tensor:
        outs: list[Tensor] = []
        for piece in row_1CL.split(MOST_UNSIGNED_PLACES // row_1CL.shape[1] - reach, dim=2):
            outs.append(convolve(in_a_row([piece]), before))
            before = piece[:, :, -reach:]
        return in_a_row(outs)

    return run


def in_a_row(parts_BCL: Sequence[Tensor]) -> Tensor:
    """Tokens after one another, with the channels of each side by side in memory: as a linear layer
    has made them, and as kernels are fast."""
    tokens = [part.transpose(1, 2) for part in parts_BCL]
    joined = tokens[0].contiguous() if len(tokens) == 1 else torch.cat(tokens, dim=1)
    return joined.transpose(1, 2)


def _last(hidden_BCL: Tensor, stop: int, size: int) -> Tensor:
    """The last tokens before a slot, flat, `size` numbers in all."""
    num_tokens = size // hidden_BCL[:, :, 0].numel()
    return hidden_BCL[:, :, stop - num_tokens : stop].flatten()
