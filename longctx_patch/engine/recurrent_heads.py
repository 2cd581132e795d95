"""A recurrence with heads exchanged for tokens in a Ulysses group, around a chain over the ring.

Each rank then has all tokens of its group for some heads, in the order of the ring's layout, and
hands states only to the ring ranks after it. Backward exchanges gradients the other way. Key heads
and groups that several ranks need go to each of them, and their gradients are summed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.engine.chain.chain_run import ChainRun
from longctx_patch.engine.chain.recurrence import Recurrence, run_recurrence
from longctx_patch.engine.ulysses import Resharder, join_tokens
from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.plans.head_split import Heads, HeadSplit
from longctx_patch.plans.recurrent import HeadTensor, heads_traffic, packets
from longctx_patch.plans.verify.chain_proof import verify_heads
from longctx_patch.sequence.layout import Layout

_OUT = (Heads.QUERY,)


@lru_cache(maxsize=32)
def checked_heads(
    num_heads: int, num_groups: int, layout: Layout, ring_layout: Layout
) -> HeadSplit:
    """The verified exchange of a recurrence's heads around the ring's part."""
    degree = layout.num_ranks // ring_layout.num_ranks
    split = HeadSplit(num_heads, num_groups, degree)
    verify_heads(split, layout, ring_layout)
    return split


def run_over_heads(
    ring: ChainRun, resharder: Resharder, recurrence: Recurrence
) -> tuple[Tensor, ChainTraffic]:
    """(the output `[B, L, H, D]` for this rank's tokens, what the exchange of heads sends).

    Collective over the sequence group. `ring` runs the ring's part, and counts what that sends.
    """
    kinds = [tensor.heads for tensor in recurrence.shape.inputs]
    sent = _by_head(recurrence.inputs)
    arrived = _ToHeads.apply(resharder, kinds, *sent)
    inputs = [
        (tensor[..., 0] if own.ndim == 3 else tensor).to(own.dtype)
        for tensor, own in zip(arrived, recurrence.inputs, strict=True)
    ]
    mine = resharder.split.query[resharder.transport.group_rank]
    out = run_recurrence(ring, recurrence.of_heads(inputs, mine))
    traffic = heads_traffic(
        resharder.split,
        [_form(tensor, kind) for tensor, kind in zip(sent, kinds, strict=True)],
        _form(out, Heads.QUERY),
        resharder.transport.group_rank,
        sizes=resharder.sizes,
        batch=out.shape[0],
        inputs_learn=any(tensor.requires_grad for tensor in sent),
        output_learns=out.requires_grad,
    )
    found: Tensor = _ToTokens.apply(resharder, out)
    return found, traffic


def _by_head(inputs: Sequence[Tensor]) -> list[Tensor]:
    """All as `[B, L, heads, D]`; those of one number per head in one dtype, so that they travel
    together."""
    numbers = [tensor.dtype for tensor in inputs if tensor.ndim == 3]
    widest = numbers[0]
    for dtype in numbers[1:]:
        widest = torch.promote_types(widest, dtype)
    return [x.to(widest)[..., None] if x.ndim == 3 else x for x in inputs]


def _form(tensor: Tensor, heads: Heads) -> HeadTensor:
    return HeadTensor(heads, tensor.shape[3], tensor.dtype.itemsize)


def _packets(tensors: Sequence[Tensor]) -> list[list[int]]:
    return packets([(tensor.shape[3], tensor.dtype) for tensor in tensors])


def _to_heads(
    resharder: Resharder, tensors: Sequence[Tensor], kinds: Sequence[Heads]
) -> tuple[Tensor, ...]:
    """`[B, tokens of the group, some heads, D]` of each tensor `[B, L, all heads, D]`."""
    parts = _packets(tensors)
    arriving = [
        resharder.to_heads([tensors[n] for n in part], [kinds[n] for n in part]) for part in parts
    ]
    found: dict[int, Tensor] = {}
    for part, heads in zip(parts, arriving, strict=True):
        found.update(zip(part, heads.wait(), strict=True))
    return tuple(found[number] for number in range(len(tensors)))


def _to_tokens(
    resharder: Resharder, tensors: Sequence[Tensor], kinds: Sequence[Heads]
) -> tuple[Tensor, ...]:
    """The way back; heads that several ranks have are summed."""
    parts = _packets(tensors)
    arriving = [
        resharder.to_tokens([tensors[n] for n in part], [kinds[n] for n in part]) for part in parts
    ]
    joined = join_tokens(arriving)
    found = dict(zip((number for part in parts for number in part), joined, strict=True))
    return tuple(found[number] for number in range(len(tensors)))


class _ToHeads(torch.autograd.Function):
    """All inputs in one function, so that backward's exchange is at one place of the program."""

    @staticmethod
    def forward(
        ctx: Any, resharder: Resharder, kinds: Sequence[Heads], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.resharder, ctx.kinds = resharder, kinds
        return _to_heads(resharder, tensors, kinds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_tokens(ctx.resharder, gradients, ctx.kinds)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, resharder: Resharder, out: Tensor) -> Tensor:
        ctx.resharder = resharder
        (found,) = _to_tokens(resharder, [out], _OUT)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (found,) = _to_heads(ctx.resharder, [gradient], _OUT)
        return None, found
