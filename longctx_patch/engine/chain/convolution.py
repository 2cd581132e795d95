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
    sizes = {
        number: hidden_BCL[:, :, 0].numel() * min(reach, segment.tokens.size)
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
    parts: list[Tensor] = []
    for number in mine:
        slots = chain.segments[number].slots
        before = [tails[other].view(*hidden_BCL.shape[:2], -1) for other in needs[number]]
        parts += [_filled(hidden_BCL, before, reach), hidden_BCL[:, :, slots.start : slots.stop]]
    out = convolve(torch.cat(parts, dim=2))
    sizes_of_parts = [part.shape[2] for part in parts]
    return torch.cat(out.split(sizes_of_parts, dim=2)[1::2], dim=2)


def _last(hidden_BCL: Tensor, stop: int, size: int) -> Tensor:
    """The last tokens before a slot, flat, `size` numbers in all."""
    num_tokens = size // hidden_BCL[:, :, 0].numel()
    return hidden_BCL[:, :, stop - num_tokens : stop].flatten()


def _filled(hidden_BCL: Tensor, before: list[Tensor], reach: int) -> Tensor:
    """The last `reach` of the tokens in `before`, with zeros in front where they are fewer."""
    zeros = hidden_BCL.new_zeros(*hidden_BCL.shape[:2], reach)
    return torch.cat([zeros, *before], dim=2)[:, :, -reach:] if reach else zeros
