"""Copies of a GPU's states on the host: checkpoints are written while training goes on."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from longctx_patch.checkpoints.manifest import MANIFEST
from tests.checkpoints.small_state import Saver, TrainState, load, state_of, tiny_model, train

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[TrainState]:
    """On one GPU, with parameters that are DTensors, and a fused optimizer."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    torch.set_default_device(GPU)  # of the rows
    model = tiny_model().to(GPU)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    yield state_of(model)
    torch.set_default_device(None)
    dist.destroy_process_group()


def test_a_checkpoint_is_of_its_step_though_training_went_on(
    sharded: TrainState, tmp_path: Path
) -> None:
    may_write = threading.Event()
    train(sharded)
    saver = Saver(tmp_path, partial(may_write.wait, 60), device_type="cuda", say=pytest.fail)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for _ in range(2):  # the second time into the memory of the first copy
        may_write.clear()
        with saver:
            place = saver.save(sharded)
            now: dict[str, Any] = get_model_state_dict(sharded.model, options=options)
            then = {name: value.clone() for name, value in now.items()}
            losses = [train(sharded) for _ in range(3)]
            assert not (place / MANIFEST).exists()
            may_write.set()
        weights = load_file(place / "model.safetensors")
        assert all(torch.equal(value, then[name]) for name, value in weights.items())
        load(sharded, place)
        assert [train(sharded) for _ in range(3)] == losses
