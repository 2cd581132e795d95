"""Attention's results kept for some tokens only: exact on gradients, and nothing else computed."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx_patch import LongContextConfig, run_virtual_ranks, virtual_group
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.operator import distributed_attention
from longctx_patch.engine.selective import first_kept, rows_before, selection_of
from longctx_patch.engine.traffic import predicted_traffic
from longctx_patch.kernels import Score
from longctx_patch.memory.replay import Frame, checkpoint_contexts
from longctx_patch.operator.decided import decided_call
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, documents_mask, prefix_lm
from longctx_patch.transport import VirtualTransport
from tests.reference import relative_error

HEADS, KV_HEADS, HEAD_DIM, BATCH = 6, 2, 8, 2
CAUSAL = Documents.one(48)
PACKED = Documents((20, 1, 19), 44)
DEGREES = [
    *((1, 1, "zigzag"), (2, 1, "zigzag"), (1, 2, "zigzag"), (1, 3, "striped"), (2, 2, None)),
    *((1, 3, "contiguous"), (1, 2, "balanced")),
]


class Case(NamedTuple):
    documents: Documents
    mask: Mask
    sinks: bool = False


CASES = {
    "causal": Case(CAUSAL, documents_mask(CAUSAL)),
    "packed": Case(PACKED, documents_mask(PACKED)),
    "window": Case(CAUSAL, documents_mask(CAUSAL, window=9)),
    "prefix": Case(CAUSAL, prefix_lm(48, 11)),
    "sinks": Case(CAUSAL, documents_mask(CAUSAL), sinks=True),
}


def inputs(num_tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, num_tokens, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return (*tensors, torch.randn(HEADS, generator=generator, dtype=torch.float64))


def dense(case: Case) -> list[Tensor]:
    """[out, dq, dk, dv, dsinks] in one process."""
    q, k, v, dout, sinks = (t.clone() for t in inputs(case.documents.num_tokens))
    leaves = [q, k, v, sinks]
    for leaf in leaves:
        leaf.requires_grad_()
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, keys) / HEAD_DIM**0.5
    allowed = torch.from_numpy(case.mask.dense())
    weights = torch.exp(scores).masked_fill(~allowed, 0.0)
    total = weights.sum(-1, keepdim=True)
    if case.sinks:
        total = total + torch.exp(sinks)[:, None, None]
    # Rows that see nothing are 0.
    shares = weights / total.masked_fill(total == 0, 1.0)
    out = torch.einsum("bhlm,bmhd->blhd", shares, values)
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


class Found(NamedTuple):
    tensors: list[Tensor]
    """out, dq, dk, dv of the rank, and dsinks."""
    sent: Traffic
    planned: Traffic
    kept_rows: int


def one_rank(group: SequenceGroup, case: Case, share: float) -> Found:
    layout = group.layout(case.documents)
    *whole, all_sinks = inputs(case.documents.num_tokens)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole)
    sinks = all_sinks.clone().requires_grad_() if case.sinks else None
    for x in (q, k, v):
        x.requires_grad_()
    score, shape = Score(HEAD_DIM**-0.5), CallShape.of(q, k)
    call = decided_call(group, case.documents, case.mask, score, shape)
    frames: list[Frame] = []

    def contexts() -> Any:
        pair = checkpoint_contexts(share=share)
        frames.append(pair[0]._frame)  # type: ignore[attr-defined]
        return pair

    out, _ = checkpoint(
        lambda *qkv: distributed_attention(*qkv, sinks, call),
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=contexts,
    )
    out.backward(dout)
    traffic = predicted_traffic(call)
    selection = selection_of(call, share)
    assert selection is not None
    again = predicted_traffic(selection.early).forward
    leaves = [x.grad for x in (q, k, v, sinks) if x is not None and x.grad is not None]
    kept = [get() for getters in frames[0].kept for get in getters]
    return Found(
        [out.detach(), *leaves],
        Traffic(group.counters.messages, group.counters.bytes),
        traffic.forward + again + traffic.backward,
        sum(tensor.shape[1] * tensor.shape[2] for tensor in kept if tensor.ndim == 4),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ulysses", "ring", "layout"), DEGREES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.75])
def test_equals_dense(name: str, ulysses: int, ring: int, layout: Any, share: float) -> None:
    case = CASES[name]
    config = LongContextConfig(
        ulysses_degree=ulysses,
        ring_degree=ring,
        layout=layout,
        checkpoint="attention",
        attention_kept=share,
    )
    ranks = run_virtual_ranks(
        config.sequence_degree,
        lambda transport: one_rank(virtual_group(transport, config), case, share),
    )
    placed = virtual_layout(config, case.documents)
    wanted = dense(case)
    for index in range(4):
        found = placed.unshard([rank.tensors[index] for rank in ranks], 1)
        assert relative_error(found, wanted[index]) < 1e-10
    if case.sinks:
        found = sum(rank.tensors[4] for rank in ranks)
        assert relative_error(torch.as_tensor(found), wanted[4]) < 1e-10
    assert all(rank.sent == rank.planned for rank in ranks)
    # What is kept: rows times heads, over all ranks.
    kept = sum(rank.kept_rows for rank in ranks)
    most = share * sum(case.documents.lengths)
    assert most - len(case.documents.lengths) < kept / HEADS <= most


def virtual_layout(config: LongContextConfig, documents: Documents) -> Any:
    def of(transport: VirtualTransport) -> Any:
        return virtual_group(transport, config).layout(documents)

    return run_virtual_ranks(config.sequence_degree, of)[0]


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("lengths", [(4096,), (4000, 64, 32)])
def test_ranks_keep_equally_much(ulysses: int, ring: int, lengths: tuple[int, ...]) -> None:
    config = LongContextConfig(
        ulysses_degree=ulysses, ring_degree=ring, checkpoint="attention", attention_kept=0.25
    )
    assert config.placement == config.packed_placement == "striped"
    documents = Documents(lengths, 4096)
    heads = 8

    def kept_rows(transport: VirtualTransport) -> int:
        group = virtual_group(transport, config)
        mask, score = documents_mask(documents), Score(1.0)
        shape = CallShape(1, heads, heads, 8, torch.float32, "cpu")
        call = decided_call(group, documents, mask, score, shape)
        selection = selection_of(call, 0.25)
        assert selection is not None
        return len(selection._rows)

    wanted = 0.25 * sum(lengths) / ring
    assert all(abs(found - wanted) <= 1 for found in run_virtual_ranks(4, kept_rows))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_the_recompute_is_the_square_of_what_is_not_kept(share: float) -> None:
    documents = Documents.one(2**20)
    mask = documents_mask(documents)
    again = mask & rows_before(documents, first_kept(documents, share))
    assert again.area / mask.area == pytest.approx((1 - share) ** 2, rel=1e-4)


def test_the_longest_documents_are_kept_first() -> None:
    documents = Documents((100, 10, 30), 150)
    assert first_kept(documents, 0.5) == 30
    assert first_kept(documents, 1.0) == 0
    assert first_kept(documents, 0.0) == 100
    table = rows_before(documents, 30).dense()
    assert np.flatnonzero(table.any(1)).tolist() == [*range(30), *range(100, 140)]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True, None])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_kept=.*from 0 to 1"):
        LongContextConfig(checkpoint="attention", attention_kept=share)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_policies_that_keep_no_part_refuse_a_share(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_kept=0\.5 with checkpoint=.*'attention'"):
        LongContextConfig(checkpoint=policy, attention_kept=0.5)


@pytest.mark.parametrize(
    ("plans", "placement"),
    [
        ({}, "striped"),
        ({"plan": "burst"}, "striped"),
        ({"plan": "zigzag"}, "zigzag"),
        ({"backward_plan": "zigzag_direct"}, "zigzag"),
        ({"plan": "ring", "backward_plan": "ring"}, "contiguous"),
        ({"layout": "contiguous"}, "contiguous"),
    ],
)
def test_the_layout_spreads_documents_where_plans_are_made_for_it(
    plans: dict[str, Any], placement: str
) -> None:
    config = LongContextConfig(ring_degree=4, checkpoint="attention", attention_kept=0.5, **plans)
    assert config.placement == placement
