"""A loop of one's own over whole rows, with Accelerate's own accumulation and data loader."""

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from longctx_patch import LongContextConfig, SequenceShardCollator, make_accelerator, patch
from tests.hf.tiny import tiny_model, token_rows
from tests.plugin.launched import has_part_of_gradient, run_launched, sharding_on_cpus
from tests.reference import relative_error
from tests.trainer.trained import weights_of

NUM_ROWS, LENGTH, STEPS, REPLICAS = 8, 21, 2, 2


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows of which some have few labels."""
    found = []
    for number, row in enumerate(token_rows(LENGTH, NUM_ROWS)):
        ids = torch.tensor(row["input_ids"])
        labels = ids.clone()
        labels[: 5 * number if number < 5 else 0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trained(accumulation: int, shards: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the loss of each row that this process saw, the weights after all rows)."""
    given: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if shards:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        given["dp_replicate_size"] = REPLICAS
    with sharding_on_cpus() if shards else nullcontext():
        accelerator = make_accelerator(LongContextConfig(ring_degree=2), **given)
    model: Any = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader: Any = DataLoader(rows(), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if shards:  # between the forwards of a step, too
                assert all(map(has_part_of_gradient, model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with pytest.raises(ValueError, match="would see the end of the loader too early"):
        next(handle.plan_ahead(batches))
    collate = SequenceShardCollator(handle.config, group_rank=handle.group_rank, pad_token_id=0)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 with a batch of Sequ"):
        model(**collate([{"input_ids": [1, 2, 3, 4]}]))
    assert isinstance(model, FSDPModule) == shards
    return losses, weights_of(handle.model)


@pytest.mark.parametrize("shards", [False, True])
def test_accelerates_accumulation_and_loader_over_whole_rows(shards: bool) -> None:
    """Two replicas of two ranks take four rows a step, as a plain loop would over their mean. With
    shards the two ranks of a replica shard the weights, too (HSDP)."""
    accumulation = NUM_ROWS // STEPS // REPLICAS
    model, wanted = tiny_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for row in rows()[step * NUM_ROWS // STEPS : (step + 1) * NUM_ROWS // STEPS]:
            batch = {name: value[None] for name, value in row.items()}
            loss = model(**batch).loss
            (loss / (NUM_ROWS // STEPS)).backward()
            wanted.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    by_rank = run_launched(trained, 2 * REPLICAS, accumulation, shards)
    for rank, (losses, weights) in enumerate(by_rank):
        assert losses == pytest.approx(wanted[rank // 2 :: REPLICAS], rel=1e-5)
        assert losses == by_rank[2 * (rank // 2)][0], "ranks that share rows have the same loss"
        for name, weight in model.named_parameters():
            assert relative_error(weights[name], weight) < 1e-6, name


Course = tuple[list[float], list[float], list[torch.Tensor]]


def documented_loops(make: Any, config: LongContextConfig | None) -> list[Course]:
    """(losses, learning rates, weights) of three optimizer steps of each loop that Accelerate's
    pages have: its accumulation, with and without a guard, and each setting of its schedulers. Half
    of them split batches, so that each pair of settings occurs."""
    return [
        scheduled(make, config, steps, guard, by_optimizer, (steps == 3) ^ guard ^ by_optimizer)
        for steps, guard, by_optimizer in product((1, 3), (True, False), (True, False))
    ]


def scheduled(
    make: Any,
    config: LongContextConfig | None,
    accumulation: int,
    is_guarded: bool,
    with_optimizer: bool,
    split_batches: bool,
) -> Course:
    GradientState._reset_state()
    accelerator = make(
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=with_optimizer,
        dataloader_config=DataLoaderConfiguration(split_batches=split_batches),
    )
    model: Any = tiny_model()
    handle = None if config is None else patch(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader: Any = DataLoader(rows()[: 2 * accumulation + 1], batch_size=1)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients or not is_guarded:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    weights = [weight.detach().clone() for weight in accelerator.unwrap_model(model).parameters()]
    if handle is not None:
        handle.unpatch()
    return losses, rates, weights


def loops_of_ours(degree: int) -> list[Course]:
    config = LongContextConfig(ring_degree=degree)
    return documented_loops(partial(make_accelerator, config, cpu=True), config)


def test_prepared_schedulers_step_as_on_one_process_in_every_documented_loop() -> None:
    wanted = documented_loops(partial(Accelerator, cpu=True), None)
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = loops_of_ours(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.testing.assert_close(alone, wanted)
    for found in run_launched(loops_of_ours, 2, 2):
        for (losses, rates, weights), plain in zip(found, wanted, strict=True):
            assert losses == pytest.approx(plain[0], rel=1e-5)
            assert rates == plain[1]
            assert all(relative_error(*pair) < 1e-5 for pair in zip(weights, plain[2], strict=True))
    guarded_with_accumulation = wanted[4 + 1]
    assert guarded_with_accumulation[1][-1] == pytest.approx(0.5 / 4), "three optimizer steps"
