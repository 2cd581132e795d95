"""Weights that each rank reads by itself, against `from_pretrained` and one process."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.families import stored_tensors
from longctx_patch.families.stored_weights import SAMPLED_ROWS
from longctx_patch.plugin import NeedsWholeReading, load_sharded, unread, unread_model
from longctx_patch.plugin.stored_check import check_stored
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, tiny_config, token_rows
from tests.memory.live_bytes import LiveBytes
from tests.plugin.launched import bits, fsdp2_on_cpu, run_launched, whole

CPU = torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "experts, joined while reading": ("mixtral", {}),
    "experts, shared and dense layers": ("qwen2_moe", {}),
    "experts, stored joined": ("gpt_oss", {}),
    "buffers of one number": ("apertus", {}),
}


def saved(folder: Path, case: str = "llama", dtype: torch.dtype = torch.float32) -> str:
    """A checkpoint of several files, of random weights."""
    family, features = CASES[case]
    model = featured_model(family, **features).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return str(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the ranks: products of experts are summed in another order by several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shard(model: nn.Module) -> None:
    """FSDP2 over layers and the rest, on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) >= 2
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


Found = tuple[dict[str, Any], ...]
Jobs = list[tuple[str, torch.dtype | None]]
"""Folders, and the dtypes that they are read in."""


def read_all(rank: int, jobs: Jobs) -> list[Found]:
    return [read(rank, *job) for job in jobs]


def read(rank: int, folder: str, dtype: torch.dtype | None) -> Found:
    """(each weight and buffer, whole; logits and configs), as `load_sharded` gives them."""
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    model = unread_model(folder, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    load_sharded(model, shard, CPU)
    return everything(model)


def everything(model: Any) -> Found:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    ids = torch.arange(30)[None]
    said = {
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "training": model.training,
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "logits": bits(whole(model(ids).logits)),
    }
    return {name: bits(whole(value)) for name, value in tensors.items()}, said


def test_everything_is_what_from_pretrained_gives(tmp_path: Path) -> None:
    """Three ranks don't divide the weights evenly, and one has none of four experts. Weights keep
    the dtype of the checkpoint unless another one is asked for."""
    jobs: Jobs = [(saved(tmp_path / case, case), None) for case in CASES]
    low = saved(tmp_path / "low", dtype=torch.bfloat16)
    jobs += [(low, dtype) for dtype in (None, torch.float32, torch.float16)]
    wanted = [
        everything(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto"))
        for folder, dtype in jobs
    ]
    assert wanted[-3][0]["lm_head.weight"][0] == torch.bfloat16
    for found in run_distributed(read_all, 3, jobs):
        for job, mine, theirs in zip(jobs, found, wanted, strict=True):
            assert mine == theirs, job


def test_what_is_written_after_reading_is_read_whole(tmp_path: Path) -> None:
    """transformers writes zeros to the row of Youtu's padding token."""
    model = featured_model("youtu", pad_token_id=5)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().weight[5].eq(0).all()
    with pytest.raises(NeedsWholeReading, match="is a youtu: transformers writes zeros to the"):
        unread_model(str(tmp_path))


def trained(source: str, how: str, precision: str, lora: bool) -> tuple[list[Any], dict[str, Any]]:
    """(losses, bits of all weights after three steps) of `prepare` under FSDP2."""
    config = LongContextConfig(ring_degree=2)
    AcceleratorState._reset_state()
    accelerator = fsdp2_on_cpu(config, precision)
    set_seed(7)
    load = unread_model if how == "unread" else AutoModelForCausalLM.from_pretrained
    model = load(source, dtype=torch.bfloat16 if lora else torch.float32)
    if lora:
        if how == "unread":
            set_seed(7 + dist.get_rank())  # rank 0's adapters become everyone's
        options = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, options)
    handle = patch(model.train(), config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    kept = {p for group in optimizer.param_groups for p in group["params"]}
    assert kept == {p for p in model.parameters() if p.requires_grad}
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    losses = []
    for step in range(3):
        batch = collate([token_rows(30, 1, seed=step)[0]])
        loss = model(**batch, num_valid_tokens=29).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss.detach()))
    return losses, {name: bits(whole(p)) for name, p in model.named_parameters()}


def both_ways(jobs: list[tuple[str, str, bool]]) -> list[list[Any]]:
    return [[trained(job[0], how, *job[1:]) for how in ("whole", "unread")] for job in jobs]


def test_steps_are_those_of_weights_that_were_loaded_whole(tmp_path: Path) -> None:
    plain, tied = (saved(tmp_path / n, n, torch.bfloat16) for n in ("llama", "tied"))
    jobs = [(plain, "no", False), (tied, "bf16", False), (plain, "bf16", True)]
    first, second = run_launched(both_ways, 2, jobs)
    for job, (wanted, found), other in zip(jobs, first, second, strict=True):
        assert found == wanted, job
        assert other[0] == other[1], job
        assert other[0][1] == wanted[1], "ranks have the same weights"
        assert wanted[0][0] != wanted[0][2], "nothing was trained"


def held_while_reading(rank: int, folders: list[str]) -> list[tuple[int, int]]:
    """(most bytes of tensors that were alive while weights were read, bytes of this rank's)."""
    found = []
    for folder in folders:
        model, live = unread_model(folder, dtype=torch.float32), LiveBytes()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(stored_tensors, "BLOCK_BYTES", 4096)
            # A mode holds for one thread. Weights are made by readers alone; here it is one.
            readers = partial(ThreadPoolExecutor, initializer=live.__enter__)
            patched.setattr(unread, "ThreadPoolExecutor", lambda _, made=readers: made(1))
            load_sharded(model, shard, CPU)
        found.append((live.top, sum(p.to_local().nbytes for p in model.parameters())))
    return found


def test_no_rank_holds_more_than_its_own_rows_and_a_block(tmp_path: Path) -> None:
    cases = ("llama", "experts, joined while reading")
    folders = [saved(tmp_path / case, case, torch.bfloat16) for case in cases]
    for folder, *ranks in zip(
        folders, *run_distributed(held_while_reading, 2, folders), strict=True
    ):
        whole_bytes = 4 * AutoModelForCausalLM.from_pretrained(folder).num_parameters()
        assert sum(kept for _, kept in ranks) == whole_bytes
        for most, kept in ranks:
            assert 0.4 * whole_bytes < kept <= most <= kept + 2 * 4096


def draw(rank: int, file: str) -> list[Found]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        set_seed(3 if rank == 0 else 4)
        model = unread_model(file, dtype=dtype)
        load_sharded(model, shard, CPU)
        found.append(everything(model))
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_random_weights_are_those_of_one_process(processes: int, tmp_path: Path) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    wanted = []
    for dtype in (torch.float32, torch.bfloat16):
        set_seed(3)
        wanted.append(everything(AutoModelForCausalLM.from_config(config, dtype=dtype)))
    for found in run_distributed(draw, processes, str(tmp_path / "config.json")):
        for (weights, said), (their_weights, they_said) in zip(found, wanted, strict=True):
            assert weights == their_weights
            assert said["logits"] == they_said["logits"]


def spoil(folder: Path, how: str) -> tuple[str, str]:
    """Spoil a checkpoint; returns what the message names, beside the file."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / places[name]
    tensors = load_file(file)
    if how == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
        return str(file), "Download it again"
    if how == "gone":
        file.unlink()
        return str(file), "Download it again"
    if how == "index":
        index.write_text("{}")
        return str(index), "not an index"
    if how == "missing":
        del tensors[name]
    elif how == "unexpected":
        tensors["model.layers.1.mlp.extra.weight"] = tensors[name].clone()
    elif how == "shape":
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    said = {
        "missing": f"{name} is in none",
        "unexpected": "model.layers.1.mlp.extra.weight is no weight of a LlamaForCausalLM",
        "shape": rf"{name} has the shape \[95, 64\].*has \[96, 64\]",
    }
    return str(folder if how == "missing" else file), said[how]


def refusals(rank: int, whole: str, folders: list[str]) -> list[str]:
    """What this rank says where only rank 1 sees a spoilt file."""
    said = []
    for folder in folders:
        with pytest.raises(ValueError) as caught:
            unread_model(folder if rank else whole)
        said.append(str(caught.value))
    return said


def test_files_that_do_not_fit_are_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    hows = ("cut short", "gone", "index", "missing", "unexpected", "shape")
    folders = [saved(tmp_path / how) for how in hows]
    wanted = [spoil(Path(folder), how) for folder, how in zip(folders, hows, strict=True)]
    first, second = run_distributed(refusals, 2, saved(tmp_path / "whole"), folders)
    assert first == second
    for message, (file, said) in zip(first, wanted, strict=True):
        assert file in message
        assert re.search(said, message)


def test_what_can_not_be_read_by_rows_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights in safetensors"):
        unread_model(str(tmp_path))
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"quantised.*from_pretrained"):
        unread_model(str(tmp_path), config=config)


def test_weights_that_are_tied_but_differ_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    words = r"embed_tokens.weight and lm_head.weight differ, but the"
    with pytest.raises(ValueError, match=words):
        unread_model(folder)
    with pytest.raises(ValueError, match=words):  # as `longctx patch` does it
        check_stored(folder, AutoConfig.from_pretrained(folder))
    # What first rows don't show is found when all are read.
    found = {path: load_file(path) for path in tmp_path.glob("*.safetensors")}
    rows = {name: weight for weights in found.values() for name, weight in weights.items()}
    for path, weights in found.items():
        if "lm_head.weight" in weights:
            first = rows["model.embed_tokens.weight"][:SAMPLED_ROWS]
            weights["lm_head.weight"][:SAMPLED_ROWS] = first
            save_file(weights, path)
    model = unread_model(folder)
    with pytest.raises(ValueError, match=words):
        load_sharded(model, lambda _: None, CPU)


def run_in_one(folder: str, change: Any = lambda model: model) -> Any:
    model = change(unread_model(folder))
    load_sharded(model, lambda _: None, CPU)
    return model


def test_what_was_made_from_unread_weights_is_refused(tmp_path: Path) -> None:
    """Copies of weights and what follows from their values; no file holds these."""
    folder = saved(tmp_path)

    def resized(model: Any) -> Any:
        model.resize_token_embeddings(100, mean_resizing=False)
        return model

    def zeroed(model: Any) -> Any:
        model.lm_head.weight.data.zero_()
        return model

    with pytest.raises(ValueError, match="made from weights that are not read yet"):
        run_in_one(folder, resized)
    with pytest.raises(ValueError, match=r"lm_head\.weight was written to before it is read"):
        run_in_one(folder, zeroed)
    model = unread_model(folder)
    assert model(torch.arange(3)[None]).logits.isnan().all()


def test_copies_that_peft_trains_are_those_of_what_is_read(tmp_path: Path) -> None:
    """Each in its own dtype, tied where the model's weights are."""
    saved_modules = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    folder = saved(tmp_path, "tied", torch.bfloat16)

    def copied(model: Any) -> Any:
        made = get_peft_model(model, saved_modules)
        made.get_input_embeddings().modules_to_save.float()
        return made

    embedding = run_in_one(folder, copied).get_input_embeddings()
    wanted = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(embedding.original_module.weight, wanted)
    assert embedding.weight.dtype == torch.float32
    assert torch.equal(embedding.weight, wanted.float())
    model = run_in_one(folder, copied)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_without_fsdp2_prepare_refuses(tmp_path: Path) -> None:
    for said in run_launched(prepared_without_fsdp2, 2, saved(tmp_path)):
        assert "distributed_type: FSDP" in said


def prepared_without_fsdp2(folder: str) -> str:
    from longctx_patch import make_accelerator

    accelerator = make_accelerator(LongContextConfig(ring_degree=2))
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(unread_model(folder))
    return str(caught.value)
