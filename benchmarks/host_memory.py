"""Host memory of processes that read their own rows of the weights, beside what is planned.

    python benchmarks/host_memory.py --model llama-70b --layers 4 --processes 2

The checkpoint is made of holes: safetensors files with a header and no blocks on the disk, which
read as zeros. Processes talk through gloo; FSDP2 shards layers and the rest. Shards stay on the
host, as with `longctx patch --states-on-host`, or nowhere (`--nowhere`: on torch's meta device, in
place of GPUs, so that models larger than the host can be read). Rank 0 samples all processes at
once (smaps_rollup); bytes are those above what they had when the model was not made yet.
"""

import argparse
import gc
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_files import write_files
from model_shapes import MODELS, model_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longctx_patch.planner.machines import GIB
from longctx_patch.plugin import load_sharded, unread_model
from longctx_patch.processes import run_processes

KINDS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
EVERY_S = 0.03
LIMIT_S = 1200.0


def write_holes(folder: Path, config: Any) -> int:
    """A checkpoint in bfloat16, one file for each layer, without blocks for the weights.

    Returns the bytes of the weights.
    """
    return write_files(folder, config, _write_file)


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
def sampled(processes: list[int]) -> Iterator[dict[str, int]]:
    """The most bytes that `processes` held together above those at the start, by kind."""
    start, done = _held(processes), threading.Event()
    most = dict.fromkeys(start, 0)

    def note() -> None:
        for kind, held in _held(processes).items():
            most[kind] = max(most[kind], held - start[kind])

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


def _held(processes: list[int]) -> dict[str, int]:
    held = dict.fromkeys(KINDS, 0)
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
            kind, value = line.split()[:2]
            if kind.removesuffix(":") in held:
                held[kind.removesuffix(":")] += 1024 * int(value)
    return held


def read(
    rank: int, small: str, folder: str, dtype: torch.dtype, nowhere: bool
) -> dict[str, int] | None:
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
    return most


def load(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model = unread_model(folder, dtype=dtype)
    load_sharded(model, shard, device)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-70b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--nowhere", action="store_true")
    asked = parser.parse_args()
    config = model_config(asked.model, asked.layers, num_tokens=131072)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as small:
        write_holes(Path(small), model_config("tiny", None, num_tokens=2))
        stored = write_holes(Path(folder), config)
        given = (small, folder, getattr(torch, asked.dtype), asked.nowhere)
        most = run_processes(read, asked.processes, *given, timeout_s=LIMIT_S)[0]
    print(json.dumps({"stored_gib": stored / GIB, **{k: v / GIB for k, v in most.items()}}))


if __name__ == "__main__":
    main()
