"""Patched models over processes against the unpatched model in one process."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.traffic import predicted_traffic
from longctx_patch.operator.decided import causal_call
from longctx_patch.sequence.layout import LayoutName
from tests.harness import run_distributed
from tests.hf.tiny import (
    FAMILIES,
    gradient_norm,
    gradients,
    mean_over_ranks,
    tiny_model,
    token_rows,
)
from tests.reference import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Result(NamedTuple):
    loss: Tensor
    logits: Tensor
    grads: dict[str, Tensor]


class Case(NamedTuple):
    family: str
    ulysses: int
    ring: int
    layout: LayoutName
    length: int
    dtype: torch.dtype

    @property
    def config(self) -> LongContextConfig:
        return LongContextConfig(
            ulysses_degree=self.ulysses,
            ring_degree=self.ring,
            layout=self.layout,
            ulysses_waves=2,
        )


def one_process(case: Case) -> Result:
    model = tiny_model(case.family, dtype=case.dtype)
    ids = torch.tensor([row["input_ids"] for row in token_rows(case.length)])
    out = model(input_ids=ids, labels=ids)
    loss = out.loss
    if case.dtype == torch.float64:
        # transformers' own loss rounds logits to float32.
        loss = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
    loss.backward()
    return Result(loss.detach(), out.logits.detach(), gradients(model))


def sharded(case: Case) -> tuple[Result, PatchHandle]:
    """What all ranks together computed, on every rank."""
    model = tiny_model(case.family, dtype=case.dtype)
    handle = patch(model, case.config)
    collate = SequenceShardCollator(case.config, group_rank=handle.group_rank, pad_token_id=0)
    batch = collate(token_rows(case.length))
    with torch.no_grad():  # with labels there are no logits
        mine = model(**{name: batch[name] for name in batch if "labels" not in name}).logits
    handle.counters.reset()
    out = model(**batch)
    out.loss.backward()
    world_size = dist.get_world_size()
    loss = mean_over_ranks(out.loss.detach())
    grads = {name: mean_over_ranks(grad) for name, grad in gradients(model).items()}
    shards = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(shards, mine.contiguous())
    layout = handle.group.layout(shards[0].shape[1] * world_size)
    logits = layout.unshard(shards, 1)[:, : case.length]
    return Result(loss, logits, grads), handle


def assert_equal(found: Result, wanted: Result, case: Case) -> None:
    bound = TOLERANCE[case.dtype]
    assert relative_error(found.loss, wanted.loss) < bound, case
    assert relative_error(found.logits, wanted.logits) < bound, case
    assert relative_error(gradient_norm(found.grads), gradient_norm(wanted.grads)) < bound, case
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert relative_error(found.grads[name], grad) < bound, (case, name)


def assert_predicted(handle: PatchHandle, case: Case) -> None:
    """Two layers, each one attention call of 4 query and 2 key-value heads of 16."""
    degree = case.config.sequence_degree * (2 if case.layout == "zigzag" and case.ring > 1 else 1)
    padded = -(-case.length // degree) * degree
    shape = CallShape(2, 4, 2, 16, case.dtype, "cpu")
    traffic = predicted_traffic(causal_call(handle.group, padded, 1.0, shape))
    per_layer = traffic.forward + traffic.backward
    assert handle.counters.messages == 2 * per_layer.messages, case
    assert handle.counters.bytes == 2 * per_layer.bytes, case


def check_cases(rank: int, cases: list[Case]) -> None:
    for case in cases:
        result, handle = sharded(case)
        assert_predicted(handle, case)
        assert_equal(result, one_process(case), case)


def cases_of(world_size: int) -> list[Case]:
    """Pairwise: each degree and layout with each length, the families in turn. All families on all
    numbers of ranks, with what is special about each, are in model/test_checks.py."""
    degrees = [(u, world_size // u) for u in (1, 2, 3, 4) if world_size % u == 0]
    layouts: tuple[LayoutName, ...] = ("zigzag", "contiguous")
    # A prime length, and one shorter than the number of chunks: some ranks hold only padding.
    shapes = [(31, torch.float32), (3, torch.float32), (13, torch.float64)]
    grid = enumerate(product(enumerate(degrees), enumerate(layouts), shapes))
    return [
        Case(FAMILIES[number % len(FAMILIES)], ulysses, ring, layout, length, dtype)
        for number, ((turn, (ulysses, ring)), (at, layout), (length, dtype)) in grid
        if (number + turn + at) % 2 == 0
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_family_equals_one_process(world_size: int) -> None:
    run_distributed(check_cases, world_size, cases_of(world_size), timeout_s=240)


@pytest.mark.parametrize("family", FAMILIES)
def test_degree_one_is_bitwise_stock(family: str) -> None:
    """The chunked loss, of the same numbers, rounds in another order: test_lm_head.py."""
    case = Case(family, 1, 1, "zigzag", 31, torch.float32)
    wanted = one_process(case)
    for policy in ("none", "full", "attention"):
        model = tiny_model(family)
        handle = patch(model, LongContextConfig(checkpoint=policy, loss="logits"))
        collate = SequenceShardCollator(handle.config, group_rank=0, pad_token_id=0)
        out = model(**collate(token_rows(31)))
        out.loss.backward()
        assert torch.equal(out.loss, wanted.loss)
        assert torch.equal(out.logits, wanted.logits)
        grads = gradients(model)
        assert all(torch.equal(grads[name], grad) for name, grad in wanted.grads.items())
        assert handle.counters.messages == 0


def check_loss_law(rank: int) -> tuple[float, dict[str, Tensor]]:
    """Two replicas of two shards; three micro batches; labels only where one shard sees them."""
    from longctx_patch import count_valid_tokens, world_place

    model = tiny_model()
    config = LongContextConfig(ring_degree=2, layout="contiguous")
    handle = patch(model, config)
    place = world_place(config)
    collate = SequenceShardCollator(config, group_rank=place.group_rank, pad_token_id=0)
    mine = [uneven_rows(micro, place.data_parallel_rank) for micro in range(3)]
    batches = [collate(rows) for rows in mine]
    num_valid_tokens = count_valid_tokens(batches)
    total = torch.zeros(())
    for batch in batches:
        loss = model(**batch, num_valid_tokens=num_valid_tokens).loss
        loss.backward()
        total += mean_over_ranks(loss.detach())
    assert handle.group_rank == place.group_rank
    return total.item(), {name: mean_over_ranks(g) for name, g in gradients(model).items()}


def uneven_rows(micro: int, replica: int) -> list[dict[str, list[int]]]:
    """Replica 0 has few labels, all in the first half; replica 1 none in its second batch."""
    rows = token_rows(16 + 2 * micro, num_rows=1, seed=10 * micro + replica)
    for row in rows:
        ids = row["input_ids"]
        if replica == 0:
            row["labels"] = [*ids[:4], *[-100] * (len(ids) - 4)]
        elif micro == 1:
            row["labels"] = [-100] * len(ids)
    return rows


def test_the_loss_law_over_replicas_shards_and_accumulation() -> None:
    model = tiny_model()
    sums, count = torch.zeros(()), 0
    for micro, replica in product(range(3), range(2)):
        (row,) = uneven_rows(micro, replica)
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([row.get("labels", row["input_ids"])])[:, 1:].flatten()
        logits = model(input_ids=ids).logits[0, :-1]
        sums = sums + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    (sums / count).backward()
    wanted = gradients(model)
    for loss, grads in run_distributed(check_loss_law, 4):
        assert loss == pytest.approx((sums / count).item(), rel=1e-5)
        for name, grad in wanted.items():
            assert relative_error(grads[name], grad) < 1e-5
