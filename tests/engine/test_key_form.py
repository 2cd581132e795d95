"""Latents that travel in place of keys and values: results, gradients, bytes, and what is held."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, run_virtual_ranks, virtual_group
from longctx_patch.engine.autograd import distributed_attention
from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.key_form import AsLatents, Expansion
from longctx_patch.engine.planned_traffic import predicted_traffic
from longctx_patch.kernels import Score
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.degrees import decide
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import VirtualTransport
from tests.covering import covering
from tests.engine.exact import TOLERANCE, causal_row, config_of
from tests.masked import Masked, dense_masked, masks_of
from tests.reference import relative_error

NOPE, ROTARY, VALUE, LATENT = 6, 4, 7, 9
HEAD_DIM = NOPE + ROTARY
ROWS = {
    "causal": causal_row(31),
    "fewer tokens than chunks": causal_row(3),
    **{row.name: row for row in masks_of(48) if row.name in ("window", "prefix", "documents")},
}
EXPANDING = [name for name, plan in PLANS.items() if not plan.gathers]


class Inputs(NamedTuple):
    """Tensors of the whole row."""

    q: Tensor
    latent: Tensor
    rotary: Tensor
    dout: Tensor
    weight: Tensor
    """`[H, LATENT, NOPE + VALUE]`: what every head's keys and values are expanded by."""


class Found(NamedTuple):
    out: Tensor
    grads: Sequence[Tensor]
    """Those of q, latent, rotary and weight."""
    sent: Traffic
    planned: Traffic
    most_rows: int
    """The most tokens that were expanded at once."""


def inputs(row: Masked, heads: int, dtype: torch.dtype, batch: int) -> Inputs:
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    length = row.documents.num_tokens
    return Inputs(
        q=normal(batch, length, heads, HEAD_DIM),
        latent=normal(batch, length, 1, LATENT),
        rotary=normal(batch, length, 1, ROTARY),
        dout=normal(batch, length, heads, VALUE),
        weight=normal(heads, LATENT, NOPE + VALUE) / 3,
    )


def expand(latent: Tensor, rotary: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, as the layers of transformers make them."""
    nope, values = torch.einsum("blr,hrd->blhd", latent[:, :, 0], weight).split((NOPE, VALUE), 3)
    return torch.cat([nope, rotary.expand(-1, -1, weight.shape[0], -1)], 3), values


def dense(given: Inputs, row: Masked) -> list[Tensor]:
    """The output, and the gradients of q, latent, rotary and weight, in one process."""
    leaves = [x.clone().requires_grad_() for x in (given.latent, given.rotary, given.weight)]
    keys, values = expand(*leaves)
    q, dout = given.q, given.dout
    wanted = dense_masked(q, keys.detach(), values.detach(), dout, row.table, None, None)
    of_heads = [wanted["dk"], wanted["dv"]]
    return [
        wanted["out"],
        wanted["dq"],
        *torch.autograd.grad([keys, values], leaves, of_heads),
    ]


def call_of(
    group: SequenceGroup, row: Masked, q: Tensor, latent: Tensor, rotary: Tensor
) -> AttentionCall:
    shape = CallShape.of(q, latent, rotary).with_latents(latent, rotary, VALUE)
    mask = row_mask(row.mask, row.documents, row.window)
    return decided_call(group, row.documents, mask, Score(HEAD_DIM**-0.5), shape)


def one_rank(group: SequenceGroup, row: Masked, given: Inputs) -> Found:
    layout, rank = group.layout(row.documents), group.group_rank
    q, latent, rotary, dout = (layout.shard(x, rank, 1) for x in given[:4])
    leaves = [x.clone().requires_grad_() for x in (q, latent, rotary, given.weight)]
    q, latent, rotary, weight = leaves
    expanded = [0]

    def expand_and_count(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        expanded.append(latent.shape[1])
        return expand(latent, rotary, weight)

    expansion = Expansion(expand_and_count, (weight,), VALUE)
    call = call_of(group, row, q, latent, rotary)
    out, _ = distributed_attention(q, latent, rotary, None, call, expansion=expansion)
    grads = torch.autograd.grad(out, leaves, dout)
    traffic = predicted_traffic(call)
    sent = Traffic(group.counters.messages, group.counters.bytes)
    planned = traffic.forward + traffic.backward
    return Found(out.detach(), grads, sent, planned, max(expanded))


def run(config: LongContextConfig, row: Masked, given: Inputs) -> list[Found]:
    def on_one_rank(transport: VirtualTransport) -> Found:
        return one_rank(virtual_group(transport, config), row, given)

    return run_virtual_ranks(config.sequence_degree, on_one_rank)


@pytest.mark.parametrize(
    ("plan", "name", "ring", "dtype", "batch"),
    covering(["auto", *EXPANDING], list(ROWS), [2, 3, 4], list(TOLERANCE), [1, 2]),
    ids=str,
)
def test_equals_dense(plan: str, name: str, ring: int, dtype: torch.dtype, batch: int) -> None:
    """The weight's gradient is the sum over ranks, those without a tile of their own included."""
    row, config = ROWS[name], config_of("auto", None, 1, ring)
    if plan != "auto":
        backward_only = Direction.FORWARD not in PLANS[plan].directions
        layout = PLANS[plan].layouts[0]
        config = config_of("auto" if backward_only else plan, layout, 1, ring)
        config = replace(config, backward_plan=plan)
    given = inputs(row, 4, dtype, batch)
    ranks, layout_of_row = run(config, row, given), config.layout_of(row.documents)
    wanted_out, *wanted = dense(given, row)
    grads = list(zip(*(found.grads for found in ranks), strict=True))
    found = [layout_of_row.unshard(shards, 1) for shards in ([r.out for r in ranks], *grads[:3])]
    found.append(torch.stack(grads[3]).sum(0))
    for number, (mine, theirs) in enumerate(zip(found, [wanted_out, *wanted], strict=True)):
        assert relative_error(mine, theirs) < TOLERANCE[dtype], number
    assert [r.sent for r in ranks] == [r.planned for r in ranks]
    # Never the whole row's heads at once: at most what one rank has.
    assert max(r.most_rows for r in ranks) <= max(layout_of_row.sizes)


@pytest.mark.parametrize("packed", [False, True])
def test_a_tenth_of_the_bytes_with_128_heads(packed: bool) -> None:
    """As the planner's simulation says, too."""
    row = ROWS["documents" if packed else "causal"]
    given, config = inputs(row, 128, torch.float32, 1), LongContextConfig(ring_degree=4)
    sent = [found.sent.bytes for found in run(config, row, given)]

    def heads_of(transport: VirtualTransport) -> int:
        group = virtual_group(transport, config)
        keys, values = expand(given.latent, given.rotary, given.weight)
        shape = CallShape.of(given.q, keys, values)
        mask = row_mask(row.mask, row.documents, row.window)
        score = Score(HEAD_DIM**-0.5)
        traffic = predicted_traffic(decided_call(group, row.documents, mask, score, shape))
        return (traffic.forward + traffic.backward).bytes

    padded = run_virtual_ranks(4, heads_of)
    assert 10 * sum(sent) <= sum(padded)
    workload = Workload(
        num_tokens=row.documents.num_tokens,
        num_heads=128,
        num_kv_heads=128,
        head_dim=HEAD_DIM,
        itemsize_bytes=4,
        latent_dim=LATENT + ROTARY,
        lengths=row.documents.lengths if packed else (),
    )
    hardware = MACHINES[config.hardware]
    setting = decide(config, workload, hardware)
    both = [predict(setting, direction, workload, hardware) for direction in Direction]
    predicted = [
        sum(of_rank) for of_rank in zip(*(p.bytes_sent_per_rank for p in both), strict=True)
    ]
    assert predicted == sent


def test_ulysses_runs_alike_with_latents_and_without() -> None:
    heads = Workload(num_tokens=65536, num_heads=128, num_kv_heads=8, head_dim=192)
    workloads = (heads, replace(heads, latent_dim=576))
    both = LongContextConfig(ulysses_degree=2, ring_degree=2)
    first, second = (decide(both, workload) for workload in workloads)
    assert first == second
    found = {predict(first, Direction.FORWARD, w, MACHINES["h100"]) for w in workloads}
    assert len(found) == 1


def test_weights_without_a_part_have_no_gradient_and_those_without_a_tile_have_zeros() -> None:
    used, twin, unused = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def expand_by_both(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        both = used + twin  # autograd may give one tensor as the gradient of both
        return c * both, c * both * 2

    expansion = Expansion(expand_by_both, (used, twin, unused), 3)
    latent, rotary = torch.randn(2, 1, 5, 1, 3, dtype=torch.float64)
    idle, busy = AsLatents(expansion, 4), AsLatents(expansion, 4)
    assert all(g is not None and not g.any() for g in idle.weight_gradients())
    for _ in range(2):
        busy.gradients(latent, rotary, lambda k, v: (k, torch.ones_like(k), torch.ones_like(v)))
    *of_used, of_unused = busy.weight_gradients()
    assert of_unused is None
    for grad in of_used:
        assert grad is not None
        assert torch.allclose(grad, 2 * 3 * latent.sum((0, 1, 2)))
    assert used.grad is None  # nothing is accumulated behind autograd's back
