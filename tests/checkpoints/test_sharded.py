"""Checkpoints of a model whose parameters are sharded (FSDP2), in gloo processes."""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, filesystem
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from longctx_patch import LongContextConfig, close_accelerator, make_accelerator
from longctx_patch.checkpoints.manifest import MANIFEST
from longctx_patch.checkpoints.output_folder import make_output
from longctx_patch.checkpoints.states import Writer
from longctx_patch.recipes.exporting import export_model
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.trainer.saved_states import STATES
from tests.checkpoints.small_state import Saver, TrainState, load, state_of, tiny_model, train
from tests.harness import run_distributed
from tests.plugin.launched import run_launched


def sharded_state(*, lora: bool) -> TrainState:
    """A freshly initialised model, sharded layer by layer as Accelerate does it."""
    model = tiny_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    decoder = model.get_decoder() if not lora else model.get_base_model().get_decoder()
    for layer in decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    return state_of(model)


def accelerator_of(rank: int) -> Any:
    """The part of an Accelerator that checkpoints use; the real one can't shard on the CPU."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=rank == 0,
        wait_for_everyone=dist.barrier,
        unwrap_model=lambda model: model,
    )


def save_and_go_on(rank: int, folder: Path, *, lora: bool) -> list[float]:
    """Saves in the background, which ends only after the steps that follow are done."""
    state = sharded_state(lora=lora)
    train(state)
    train(state)
    tokenizer, all_done = byte_tokenizer(), threading.Event()

    with Saver(folder, partial(all_done.wait, 60)) as saver:
        place = saver.save(state)
        export_model(accelerator_of(rank), state.model, tokenizer, folder, seed=0, step=2)
        losses = [train(state) for _ in range(3)]
        assert not (place / MANIFEST).exists()
        all_done.set()
    assert (place / MANIFEST).exists()
    return losses


def load_and_go_on(folder: Path, *, lora: bool) -> list[float]:
    state = sharded_state(lora=lora)
    train(state)  # an older state there is replaced
    load(state, folder / "checkpoint-2")
    assert state.step == 2
    return [train(state) for _ in range(3)]


def save_and_load(rank: int, folder: str) -> dict[str, list[float]]:
    losses = {}
    for name in ("full", "lora"):
        output, lora = Path(folder) / name, name == "lora"
        losses[name] = save_and_go_on(rank, output, lora=lora)
        assert load_and_go_on(output, lora=lora) == losses[name]
    return losses


def load_full(_: int, folder: str) -> list[float]:
    return load_and_go_on(Path(folder) / "full", lora=False)


def test_sharded_models_go_on_exactly_and_are_saved_whole(tmp_path: Path) -> None:
    losses, same_losses = run_distributed(save_and_load, 2, str(tmp_path))
    assert losses == same_losses
    (elsewhere,) = run_distributed(load_full, 1, str(tmp_path))
    torch.testing.assert_close(torch.tensor(elsewhere), torch.tensor(losses["full"]))

    full, lora = (tmp_path / name / "checkpoint-2" for name in ("full", "lora"))
    base = tiny_model()
    ids = torch.arange(40).view(2, 20) + 2
    for name, model in (
        ("full", AutoModelForCausalLM.from_pretrained(full)),
        ("full", AutoModelForCausalLM.from_pretrained(tmp_path / "full")),
        ("lora", PeftModel.from_pretrained(base, str(lora))),
    ):
        loss = model(input_ids=ids, labels=ids).loss.item()
        torch.testing.assert_close(loss, losses[name][0])

    kept = FileSystemReader(lora / STATES).read_metadata().state_dict_metadata
    assert all("lora_" in name for name in kept if name.startswith("model."))


def test_what_one_thread_could_not_write_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer only prints the error of a thread; ours raises."""
    write = filesystem._write_item

    def fails_beside(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("No space left on device")
        return write(*args)

    monkeypatch.setattr(filesystem, "_write_item", fails_beside)
    states = {str(number): torch.zeros(100) for number in range(8)}
    writer = Writer(tmp_path / "state")
    with pytest.raises(CheckpointException, match="states could not be written to"):
        dcp.save(states, storage_writer=writer, no_dist=True)


def make_outputs(folder: Path) -> None:
    accelerator = make_accelerator(LongContextConfig())
    make_output(accelerator, folder / "shared")
    own = folder / f"of_{accelerator.process_index}"
    with pytest.raises(ValueError, match=r"another folder for processes \[1\] than for process 0"):
        make_output(accelerator, own)
    close_accelerator(accelerator)


def test_an_output_that_machines_do_not_share_is_refused_by_all(tmp_path: Path) -> None:
    run_launched(make_outputs, 2, tmp_path)
    left = sorted(path.name for path in tmp_path.rglob("*"))
    assert left == ["of_0", "of_1", "shared"]
