"""Compares attention on the ranks of a group with dense attention, and its traffic with plans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx_patch import LongContextConfig, attention, run_virtual_ranks, virtual_group
from longctx_patch.engine.autograd import distributed_attention
from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.planned_traffic import predicted_traffic
from longctx_patch.engine.selective import selection_of
from longctx_patch.kernels import Score
from longctx_patch.memory.replay import Frame, checkpoint_contexts
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import causal
from tests.masked import Masked, dense_masked
from tests.reference import relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def causal_call(
    group: SequenceGroup, num_tokens: int, scale: float, shape: CallShape
) -> AttentionCall:
    """Plain causal attention over one document."""
    row, mask = Documents.one(num_tokens), causal(num_tokens)
    return decided_call(group, row, mask, Score(scale), shape)


def causal_row(num_tokens: int) -> Masked:
    """One document in which each token sees itself and all before it."""
    table = np.tri(num_tokens, dtype=np.bool_)
    return Masked("causal", Documents.one(num_tokens), None, None, table)


def config_of(plan: Any, layout: Any, ulysses: int, ring: int) -> LongContextConfig:
    """A config that names a plan and a layout; a double ring has two ranks per node, or one."""
    per_node = (2 if ring % 2 == 0 and ring > 2 else 1) if plan == "double_ring" else None
    return LongContextConfig(
        ulysses_degree=ulysses,
        ring_degree=ring,
        plan=plan,
        layout=layout,
        ranks_per_node=per_node,
    )


class Case(NamedTuple):
    """One call of attention."""

    config: LongContextConfig
    masked: Masked
    heads: tuple[int, int] = (4, 2)
    """Query and key-value heads."""
    dtype: torch.dtype = torch.float64
    batch: int = 2
    sinks: bool = False
    softcap: float | None = None
    share: float | None = None
    """The share of the tokens whose results are kept for a recompute; None: no recompute."""
    head_dim: int = 8
    value_dim: int = 8
    device: str = "cpu"


class Found(NamedTuple):
    """The results, the traffic and the plans' traffic of one rank."""

    tensors: dict[str, Tensor]
    sent: Traffic
    planned: Traffic
    kept_rows: int
    """Rows times heads that were kept for the recompute."""


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, dout of the whole sequence and a sink per head: the same on every rank."""
    length, (heads, kv_heads) = case.masked.documents.num_tokens, case.heads
    generator = torch.Generator(case.device).manual_seed(100 * length + heads)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=case.device)

    key, value = case.head_dim, case.value_dim
    sizes = [(heads, key), (kv_heads, key), (kv_heads, value), (heads, value)]
    of_tokens = [normal(case.batch, length, *size) for size in sizes]
    # The gradient of sinks is a sum over ranks, so sinks are in float32.
    return [*of_tokens, normal(heads, dtype=torch.promote_types(case.dtype, torch.float32))]


def one_rank(group: SequenceGroup, case: Case) -> Found:
    """Forward and backward of this rank's shard."""
    *whole, all_sinks = inputs(case)
    layout = group.layout(case.masked.documents)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole)
    sinks = all_sinks.clone().requires_grad_() if case.sinks else None
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([] if sinks is None else [sinks])
    masked, shape = case.masked, CallShape.of(q, k, v)
    mask = row_mask(masked.mask, masked.documents, masked.window)
    score = Score(case.head_dim**-0.5, case.softcap)
    call = decided_call(group, masked.documents, mask, score, shape, returns_lse=case.share is None)
    kept_rows = 0
    if case.share is None:
        out, lse = attention(
            q,
            k,
            v,
            group=group,
            documents=masked.documents,
            window=masked.window,
            mask=masked.mask,
            sinks=sinks,
            softcap=case.softcap,
        )
        results = {"out": out.detach(), "lse": lse}
    else:
        out, kept_rows = _replayed(call, q, k, v, sinks, case.share)
        results = {"out": out.detach()}
    names = ("dq", "dk", "dv", "dsinks")
    results |= zip(names, torch.autograd.grad(out, leaves, dout), strict=False)
    sent = Traffic(group.counters.messages, group.counters.bytes)
    return Found(results, sent, _planned(call, case.share), kept_rows)


def _replayed(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, share: float
) -> tuple[Tensor, int]:
    """(out, rows times heads that were kept) of attention in a checkpointed region."""
    frames: list[Frame] = []

    def contexts() -> Any:
        pair = checkpoint_contexts(share=share)
        frames.append(pair[0]._frame)  # type: ignore[attr-defined]
        return pair

    out, _ = checkpoint(
        lambda q, k, v: distributed_attention(q, k, v, sinks, call),
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=contexts,
    )
    kept = [get() for getters in frames[0].kept for get in getters]
    return out, sum(tensor.shape[1] * tensor.shape[2] for tensor in kept if tensor.ndim == 4)


def _planned(call: AttentionCall, share: float | None) -> Traffic:
    """The traffic of forward, of a recompute if there is one, and of backward, by the plans."""
    traffic = predicted_traffic(call)
    if share is None:
        return traffic.forward + traffic.backward
    selection = selection_of(call, share)
    if selection is None:
        return traffic.forward + traffic.backward_after_replay
    return traffic.forward + predicted_traffic(selection.early).forward + traffic.backward


def assert_exact(case: Case, ranks: Sequence[Found] | None = None) -> Sequence[Found]:
    """Compare the results of `ranks` (default: run virtual ranks) with dense attention."""
    if ranks is None:
        ranks = run_virtual_ranks(
            case.config.sequence_degree, lambda t: one_rank(virtual_group(t, case.config), case)
        )
    q, k, v, dout, all_sinks = inputs(case)
    sinks = all_sinks if case.sinks else None
    expected = dense_masked(q, k, v, dout, case.masked.table, sinks, case.softcap)
    layout = case.config.layout_of(case.masked.documents)
    where = f"{case.masked.name}, {case._replace(masked=None)}"  # type: ignore[arg-type]
    for name in ranks[0].tensors:
        shards, wanted = [found.tensors[name] for found in ranks], expected[name]
        if name == "dsinks":
            result = torch.stack(shards).sum(0)
        else:
            result = layout.unshard(shards, 2 if name == "lse" else 1)
        seen = wanted.isfinite()
        assert torch.equal(result.isfinite(), seen), f"{name} of {where}"
        error = relative_error(result[seen], wanted[seen])
        assert error < TOLERANCE[case.dtype], f"{name} of {where}: {error}"
    assert [found.sent for found in ranks] == [found.planned for found in ranks], where
    return ranks
