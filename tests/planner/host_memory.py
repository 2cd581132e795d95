"""Host memory of processes that read their own rows of the weights.

The checkpoint is made of holes: safetensors files with a header and no blocks on the disk, which
read as zeros. Processes talk through gloo; FSDP2 shards layers and the rest. Shards stay on the
host, as with `longctx patch --states-on-host`, or nowhere (on torch's meta device, in place of
GPUs). Rank 0 samples all processes at once (smaps_rollup); bytes are those above what they had when
the model was not made yet.
"""

import gc
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from longctx_patch.plugin import load_sharded, unread_model

EVERY_S = 0.03


def write_holes(folder: Path, config: Any) -> int:
    """A checkpoint in bfloat16, one file for each layer, without blocks for the weights.

    Returns the bytes of the weights.
    """
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.named_parameters():  # tied ones once
        words = name.split(".")
        number = words[2] if words[1] == "layers" else "rest"
        files.setdefault(f"model-{number}.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        _write_file(folder / file, tensors)
    weight_map = {name: file for file, names in files.items() for name in names}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    entries, end = {}, 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


@contextmanager
def sampled(processes: list[int]) -> Iterator[list[int]]:
    """The most bytes that `processes` held together above those at the start; one number."""
    start, done, most = _held(processes), threading.Event(), [0]

    def note() -> None:
        most[0] = max(most[0], _held(processes) - start)

    def sample() -> None:
        while not done.wait(EVERY_S):
            note()

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield most
    finally:
        done.set()
        sampler.join()
        note()  # what stays


def _held(processes: list[int]) -> int:
    rollups = (Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    return sum(1024 * int(re.findall(r"^Pss: +(\d+)", text, re.MULTILINE)[0]) for text in rollups)


def read(rank: int, small: str, folder: str, dtype: torch.dtype, nowhere: bool) -> int | None:
    """What all processes held while they read, on rank 0. `small` is read before, for what is
    imported and copied at first use."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, os.getpid())
    device = torch.device("meta" if nowhere else "cpu")
    load(small, dtype, device)
    gc.collect()
    dist.barrier()
    with sampled(everyone) if rank == 0 else nullcontext() as most:
        dist.barrier()
        model = load(folder, dtype, device)
        dist.barrier()
    dist.barrier()  # the others' weights stay until all was sampled
    del model
    return None if most is None else most[0]


def load(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model = unread_model(folder, dtype=dtype)
    load_sharded(model, shard, device)
    return model
