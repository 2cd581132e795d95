"""Ulysses in waves: heads are computed once each, and what is computed doesn't depend on waves."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx_patch import LongContextConfig, run_virtual_ranks, virtual_group
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.operator import distributed_attention
from longctx_patch.engine.traffic import predicted_traffic
from longctx_patch.memory.replay import checkpoint_contexts
from longctx_patch.operator.decided import causal_call
from longctx_patch.plans.head_split import HeadSplit
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.transport import VirtualTransport
from tests.reference import dense_attention, relative_error

LENGTH, HEAD_DIM = 13, 8


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (32, 32), (7, 7), (12, 4)])
@pytest.mark.parametrize("degree", [1, 2, 4, 5])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_every_head_is_computed_once(heads: int, kv_heads: int, degree: int, most: int) -> None:
    waves = HeadSplit(heads, kv_heads, degree).in_waves(most)
    assert len(waves) == (1 if degree == 1 else min(most, heads // degree))
    cuts = [cut for wave in waves for cut in wave.query]
    assert sorted(head for cut in cuts for head in range(*cut)) == list(range(heads))
    for wave in waves:
        for q, kv in zip(wave.query, wave.key_value, strict=True):
            used = {head * kv_heads // heads for head in range(*q)}
            assert used == set(range(*kv))


def test_waves_are_of_whole_key_value_heads_where_there_are_enough() -> None:
    waves = HeadSplit(32, 8, 4).in_waves(2)
    assert [cut.size for wave in waves for cut in wave.key_value] == [1] * 8
    alone = HeadSplit(28, 4, 4).in_waves(2)  # one key-value head a rank: it goes with both waves
    assert [cut.size for wave in alone for cut in wave.query] == [3] * 4 + [4] * 4


def whole(batch: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(batch, LENGTH, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def one_rank(
    group: SequenceGroup, batch: int, heads: int, kv_heads: int, replayed: bool
) -> tuple[list[Tensor], Traffic, Traffic]:
    """((out, lse, dq, dk, dv), what was sent, what was predicted)."""
    layout = group.layout(LENGTH)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole(batch, heads, kv_heads))
    for x in (q, k, v):
        x.requires_grad_()
    shape = CallShape.of(q, k)
    call = causal_call(group, LENGTH, HEAD_DIM**-0.5, shape, returns_lse=not replayed)
    if replayed:
        out, lse = checkpoint(
            lambda *qkv: distributed_attention(*qkv, None, call),
            q,
            k,
            v,
            use_reentrant=False,
            context_fn=checkpoint_contexts,
        )
    else:
        out, lse = distributed_attention(q, k, v, None, call)
    out.backward(dout)
    counters, plan = group.counters, predicted_traffic(call)
    backward = plan.backward_after_replay if replayed else plan.backward
    grads = [x.grad for x in (q, k, v) if x.grad is not None]
    sent = Traffic(counters.messages, counters.bytes)
    return [out.detach(), lse, *grads], sent, plan.forward + backward


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("degrees", [(2, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("replayed", [False, True])
def test_waves_equal_dense(waves: int, degrees: tuple[int, int], replayed: bool) -> None:
    ulysses, ring = degrees
    config = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring, ulysses_waves=waves)
    for batch, (heads, kv_heads) in product((1, 2), ((12, 6), (7, 1), (6, 6))):

        def run(
            transport: VirtualTransport, numbers: tuple[int, int, int] = (batch, heads, kv_heads)
        ) -> tuple[list[Tensor], Traffic, Traffic]:
            return one_rank(virtual_group(transport, config), *numbers, replayed)

        ranks = run_virtual_ranks(config.sequence_degree, run)
        layout = config.layout_of(Documents.one(LENGTH))
        wanted = dense_attention(*whole(batch, heads, kv_heads))
        for index, reference in enumerate(wanted):
            if replayed and index == 1:  # lse stays with the heads then
                continue
            shards = [tensors[index] for tensors, _, _ in ranks]
            found = layout.unshard(shards, 2 if index == 1 else 1)
            assert relative_error(found, reference) < 1e-10
        assert all(sent == predicted for _, sent, predicted in ranks)
