"""Forward and backward of one rank: Ulysses' exchanges around a plan.

Ulysses around a ring plan is USP (Fang and Zhao 2024). Heads go in waves: all exchanges of heads
for tokens are posted first; each wave is computed once it has arrived, and its results travel back
while the next wave is computed. Only the first wave's way in and the last one's way back are left
to wait for.

Legend: B batch, L tokens of this rank, S tokens of its Ulysses group, H query heads, G key-value
heads, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.accumulate import sum_dtype
from longctx_patch.engine.call import AttentionCall, HeadWave
from longctx_patch.engine.executor import Executor, row_dots
from longctx_patch.engine.key_form import AS_HEADS, KeyForm
from longctx_patch.engine.ulysses import ArrivingHeads, ArrivingTokens, join_waves
from longctx_patch.plans import Direction
from longctx_patch.plans.head_split import QKV, Heads


class Saved(NamedTuple):
    """What backward needs: a wave's tensors as its plan saw them, or all heads of own tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """`[B, heads, S]` for the heads that this rank computes, even where the other tensors are
    `[B, L, ...]` of all heads."""


class ForwardResult(NamedTuple):
    saved: list[Saved]
    """What each wave saves for backward."""
    out_BLHD: Tensor
    lse: Tensor
    """`[B, H, L]` where `call.returns_lse`, else `[B, heads, S]` as in `Saved`, for all waves."""


def usp_forward(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    complete: Callable[[int, Saved], None] | None = None,
    form: KeyForm = AS_HEADS,
) -> ForwardResult:
    """Attention of `q` `[B, L, H, D]` over `k` and `v` `[B, L, G, D]`, with `sinks` `[H]` if any.

    Keys and values travel in their form; Ulysses exchanges heads, and needs them as such.

    `complete(number, saved)` may put known rows into the results of a wave before they go back.
    """
    executor, waves = call.executor, call.waves
    if call.group.ulysses.num_ranks == 1:
        (wave,) = waves
        whole = _compute_forward(wave, executor, (q, k, v), sinks, form)
        if complete is not None:
            complete(0, whole)
        return ForwardResult([whole], whole.out, whole.lse)
    arriving = [wave.resharder.to_heads([q, k, v], QKV) for wave in waves]
    saved: list[Saved] = []
    leaving: list[list[ArrivingTokens]] = []
    for number, (wave, inputs) in enumerate(zip(waves, arriving, strict=True)):
        part = _compute_forward(wave, executor, inputs.wait(), sinks)
        if complete is not None:
            complete(number, part)
        # lse has one number per head and token, so it travels as heads of dim 1.
        results = [part.out, part.lse.transpose(1, 2)[..., None]]
        saved.append(part)
        leaving.append(
            [
                wave.resharder.to_tokens([result], [Heads.QUERY])
                for result in results[: 1 + call.returns_lse]
            ]
        )
    out, *lse_BLH1 = join_waves(leaving)
    if lse_BLH1:
        return ForwardResult(saved, out, lse_BLH1[0][..., 0].transpose(1, 2).contiguous())
    return ForwardResult(saved, out, all_lse(saved))


def all_lse(saved: Sequence[Saved]) -> Tensor:
    """The lse of all waves side by side: `[B, heads, S]`."""
    return saved[0].lse if len(saved) == 1 else torch.cat([part.lse for part in saved], 1)


def usp_backward(
    call: AttentionCall,
    dout: Tensor,
    saved: Sequence[Saved],
    sinks: Tensor | None,
    *,
    local: bool,
    form: KeyForm = AS_HEADS,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This rank's gradients: (dq_BLHD, dk_BLGD, dv_BLGD, dsinks_H).

    `local`: `saved` has all heads of this rank's tokens, so it is exchanged once more.
    """
    executor = call.executor
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    grads: list[list[Tensor]] = []
    leaving: list[list[ArrivingTokens]] = []
    for wave, wave_dout, part in _backward_inputs(call, dout, saved, local=local):
        grads.append(_compute_backward(wave, executor, wave_dout, part, form))
        if sinks is not None and dsinks is not None:
            dsinks[wave.heads] = _sink_gradient(sinks[wave.heads], wave_dout, part)
        if call.group.ulysses.num_ranks > 1:
            leaving.append([wave.resharder.to_tokens(grads.pop(), QKV)])
    dq, dk, dv = join_waves(leaving) if leaving else grads[0]
    return dq, dk, dv, dsinks


def _backward_inputs(
    call: AttentionCall, dout: Tensor, saved: Sequence[Saved], *, local: bool
) -> Iterator[tuple[HeadWave, Tensor, Saved]]:
    """Each wave with its heads' part of dout and of what forward saved."""
    waves = call.waves
    if call.group.ulysses.num_ranks == 1:
        yield waves[0], dout, saved[0]
        return
    arriving = [_exchange_for_backward(wave, dout, saved, local) for wave in waves]
    widths = [wave.heads.stop - wave.heads.start for wave in waves]
    lse_of_waves = saved[0].lse.split(widths, 1) if local else [part.lse for part in saved]
    for index, (wave, exchanges) in enumerate(zip(waves, arriving, strict=True)):
        *arrived, wave_dout = (tensor for exchange in exchanges for tensor in exchange.wait())
        part = Saved._make([*arrived, lse_of_waves[index]]) if local else saved[index]
        yield wave, wave_dout, part


def _exchange_for_backward(
    wave: HeadWave, dout: Tensor, saved: Sequence[Saved], local: bool
) -> list[ArrivingHeads]:
    """Begin to exchange dout, and (q, k, v) and out too where only this rank's tokens were saved.

    out and dout each travel alone, since kernels want them contiguous.
    """
    query = [Heads.QUERY]
    exchanges = []
    if local:
        q, k, v, out, _ = saved[0]
        exchanges = [wave.resharder.to_heads([q, k, v], QKV), wave.resharder.to_heads([out], query)]
    return [*exchanges, wave.resharder.to_heads([dout], query)]


def _compute_forward(
    wave: HeadWave,
    executor: Executor,
    qkv: Sequence[Tensor],
    sinks: Tensor | None,
    form: KeyForm = AS_HEADS,
) -> Saved:
    q, k, v = qkv
    mine = None if sinks is None else sinks[wave.heads]
    plan = wave.plan(Direction.FORWARD)
    out, lse = executor.forward(plan, q, *_repeat_heads(wave, k, v), mine, form=form)
    return Saved(q, k, v, out, lse)


def _compute_backward(
    wave: HeadWave, executor: Executor, dout: Tensor, part: Saved, form: KeyForm
) -> list[Tensor]:
    """The gradients [dq, dk, dv] of a wave's heads, in the dtype of the model."""
    q, k, v, out, lse = part
    plan = wave.plan(Direction.BACKWARD)
    dq, dk, dv = executor.backward(
        plan,
        dout,
        q,
        *_repeat_heads(wave, k, v),
        out,
        lse,
        form=form,
        keys_as_summed=wave.kv_runs is not None,
    )
    return [dq, _sum_repeated(wave, dk).to(k.dtype), _sum_repeated(wave, dv).to(v.dtype)]


def _sink_gradient(sinks: Tensor, dout: Tensor, part: Saved) -> Tensor:
    """What this rank's rows add to dsinks. A sink is a key whose value is 0, so dP is 0 there."""
    p_BHL = torch.exp(sinks.to(part.lse.dtype)[:, None] - part.lse)
    return -(p_BHL * row_dots(dout, part.out).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)


def _repeat_heads(wave: HeadWave, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key-value heads where this rank's query heads don't group evenly over them."""
    runs = wave.kv_runs
    if runs is None:
        return k, v

    def repeated(x: Tensor) -> Tensor:
        parts = [x[:, :, i : i + 1].expand(-1, -1, run.size, -1) for i, run in enumerate(runs)]
        return torch.cat(parts, 2)

    return repeated(k), repeated(v)


def _sum_repeated(wave: HeadWave, grad: Tensor) -> Tensor:
    """Sum the gradients of repeated heads, in float32 or wider and in a fixed order."""
    runs = wave.kv_runs
    if runs is None:
        return grad
    wide = grad.to(sum_dtype(grad.dtype))
    return torch.stack([wide[:, :, slice(run.start, run.stop)].sum(2) for run in runs], 2)
