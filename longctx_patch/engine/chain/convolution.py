"""A short causal convolution over the segments of a chain, which hand on their last tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from longctx_patch.engine.chain.hand_over import hand_over
from longctx_patch.engine.chain.run import ChainRun, checked_tails

Convolution = Callable[[Tensor], Tensor]
"""`[B, C, L]` in and out: each output of its own token and the `reach` tokens before it."""


def run_convolution(run: ChainRun, convolve: Convolution, hidden_BCL: Tensor, reach: int) -> Tensor:
    """`convolve` of this rank's tokens, each document by itself. Collective over ranks that share
    documents.

    All segments are convolved in one call, with the `reach` tokens before each in front of it:
    what other segments hold of them, and zeros before a document, as the convolution pads.
    """
    chain, needs = run.chain, checked_tails(run.chain, reach)
    mine = chain.of_rank(run.rank)
    of_token = hidden_BCL.shape[0] * hidden_BCL.shape[1]
    sizes = {
        number: of_token * min(reach, segment.tokens.size)
        for number, segment in enumerate(chain.segments)
    }
    exchange = run.exchange(needs, sizes, hidden_BCL.dtype)
    wanted = {number for needed in needs for number in needed}
    tails = {
        number: _last(hidden_BCL, chain.segments[number].slots.stop, sizes[number])
        for number in mine
        if number in wanted
    }
    foreign, (hidden_BCL,) = hand_over(exchange, tails, (hidden_BCL,))
    if len(mine) == 1 and not needs[mine[0]]:
        return convolve(hidden_BCL)
    tails |= foreign
    zeros = hidden_BCL.new_zeros(*hidden_BCL.shape[:2], reach)
    tokens = hidden_BCL.split([chain.segments[number].slots.size for number in mine], dim=2)
    parts: list[Tensor] = []
    for number, own in zip(mine, tokens, strict=True):
        before = [tails[other].view(*zeros.shape[:2], -1) for other in needs[number]]
        filled = torch.cat([zeros, *before], dim=2)[:, :, -reach:] if before else zeros
        parts += [filled, own]
    out = convolve(torch.cat(parts, dim=2))
    sizes_of_parts = [part.shape[2] for part in parts]
    return torch.cat(out.split(sizes_of_parts, dim=2)[1::2], dim=2)


def _last(hidden_BCL: Tensor, stop: int, size: int) -> Tensor:
    """The last tokens before a slot, flat, `size` numbers in all."""
    num_tokens = size // hidden_BCL[:, :, 0].numel()
    return hidden_BCL[:, :, stop - num_tokens : stop].flatten()
