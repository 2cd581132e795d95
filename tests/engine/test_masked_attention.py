"""Every kind of mask under every plan against dense attention, on virtual ranks."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, attention, run_virtual_ranks, virtual_group
from longctx_patch.engine.executor import only_call
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.kernels import available
from longctx_patch.operator.decided import row_mask
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import PLANS, make_schedule
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName
from longctx_patch.sequence.placement import place
from tests.masked import Masked, dense_masked, masks_of
from tests.reference import relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
HEAD_DIM, BATCH = 8, 2


def inputs(length: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout and a sink for each head."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, length, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [*tensors, torch.randn(heads[0], generator=generator, dtype=dtype)]


def one_rank(
    group: SequenceGroup, case: Masked, whole: list[Tensor], *, sinks: bool, softcap: float | None
) -> tuple[dict[str, Tensor], int]:
    """This rank's results, and the bytes that it sent."""
    layout = group.layout(case.documents)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole[:4])
    sink = whole[4].clone()
    leaves = [q, k, v, *([sink] if sinks else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = attention(
        q,
        k,
        v,
        group=group,
        documents=case.documents,
        window=case.window,
        mask=case.mask,
        sinks=sink if sinks else None,
        softcap=softcap,
    )
    grads = torch.autograd.grad(out, leaves, dout)
    names = ("dq", "dk", "dv", "dsinks")
    found = {"out": out.detach(), "lse": lse, **dict(zip(names, grads, strict=False))}
    return found, group.counters.bytes


def assert_exact(
    config: LongContextConfig,
    case: Masked,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    *,
    sinks: bool = False,
    softcap: float | None = None,
) -> int:
    """Compare with dense attention; the bytes that all ranks sent."""
    whole = inputs(case.documents.num_tokens, heads, dtype)
    ranks = run_virtual_ranks(
        config.sequence_degree,
        lambda t: one_rank(virtual_group(t, config), case, whole, sinks=sinks, softcap=softcap),
    )
    expected = dense_masked(*whole[:4], case.table, whole[4] if sinks else None, softcap)
    layout = place(
        config.placement_of(case.documents),
        case.documents,
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )
    for name, wanted in expected.items():
        shards = [found[name] for found, _ in ranks]
        if name == "dsinks":
            whole_result = torch.stack(shards).sum(0)
        else:
            whole_result = layout.unshard(shards, 2 if name == "lse" else 1)
        seen = wanted.isfinite()
        assert torch.equal(whole_result.isfinite(), seen), f"{name}: {case.name}, {config}"
        error = relative_error(whole_result[seen], wanted[seen])
        assert error < TOLERANCE[dtype], f"{name} of {case.name} under {config}: {error}"
    return sum(sent for _, sent in ranks)


def all_plans(ring: int) -> Iterator[LongContextConfig]:
    for plan, record in PLANS.items():
        if plan == "double_ring" and ring % 2:
            continue
        per_node = 2 if plan == "double_ring" else None
        for layout in record.layouts:
            yield LongContextConfig(
                ring_degree=ring, plan=plan, layout=layout, ranks_per_node=per_node
            )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", list(masks_of(41)), ids=lambda case: case.name)
def test_every_mask_under_every_plan(num_ranks: int, case: Masked) -> None:
    for config in all_plans(num_ranks) if num_ranks > 1 else [LongContextConfig()]:
        assert_exact(config, case, (4, 2))


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (4, 1), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("case", list(masks_of(40)), ids=lambda case: case.name)
def test_every_mask_under_ulysses(ulysses: int, ring: int, case: Masked) -> None:
    for heads in ((4, 2), (7, 7)):
        config = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring)
        assert_exact(config, case, heads, sinks=True)


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "contiguous"])
@pytest.mark.parametrize("case", list(masks_of(64)), ids=lambda case: case.name)
def test_sinks_and_softcap(layout: LayoutName, case: Masked) -> None:
    config = LongContextConfig(ring_degree=3, layout=layout)
    for dtype in TOLERANCE:
        assert_exact(config, case, (6, 2), dtype, sinks=True, softcap=1.5)
        assert_exact(replace(config, plan="allgather"), case, (6, 2), dtype, sinks=True)


@pytest.mark.parametrize("kernel", ["torch_cpu", "torch_eager"])
def test_ranks_with_whole_documents_send_nothing(kernel: str) -> None:
    """One kernel takes all of a rank's documents in a call, the other does not."""
    row, tokens = Documents((6, 10) * 4, 64), np.arange(64)
    document = np.repeat(np.arange(8), row.lengths)
    table = (tokens[:, None] >= tokens) & (document[:, None] == document)
    case = Masked("whole", row, None, None, table)
    config = LongContextConfig(ring_degree=4, kernel=kernel)
    assert assert_exact(config, case, (4, 2)) == 0
    layout = place("balanced", row, ring=4)
    traits = available()[kernel].traits
    for direction in Direction:
        plan = make_schedule(
            "halo", direction, layout, row_mask(None, row, None), num_kv_heads=2
        ).plan()
        calls = [only_call(plan, rank, traits) for rank in range(4)]
        assert [call is not None for call in calls] == [traits.segments] * 4


def test_rows_of_padding_alone_see_nothing() -> None:
    """Also a rank that holds nothing else."""
    padded = Documents((2, 1), 12)
    table = np.zeros((12, 12), dtype=np.bool_)
    table[:2, :2] = [[True, False], [True, True]]
    table[2, 2] = True
    for sinks in (False, True):
        config = LongContextConfig(ring_degree=4, layout="contiguous")
        assert_exact(config, Masked("padding", padded, None, None, table), (2, 2), sinks=sinks)
