"""One launch of predicted.py: runs, one after the other in the same processes.

Appends a line of JSON for each.
"""

import gc
import json
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from launch import free_port
from measure import Row, everyone
from model_shapes import model_config
from report import append_line
from runs import Run
from systems import make_optimizer
from systems.ours import launch_environment
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from longctx_patch import PatchHandle, SequenceShardCollator, patch
from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.hf.model.transformers_api import decoder_layers
from longctx_patch.hf.preflight import Preflight, preflight
from longctx_patch.plugin import close_accelerator, make_accelerator, states_on_host

GIB = 2**30
CHECK_TOKENS = 2048
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}  # of the small row's loss; bfloat16 there, float32 here


class Training:
    """A patched model under FSDP2, and its optimizer, as the recipe makes them."""

    def __init__(self, run: Run, config: PreTrainedConfig, accelerator: Any) -> None:
        self.device = accelerator.device
        self._accelerator = accelerator
        torch.manual_seed(0)
        with self.device:
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, run.dtype), attn_implementation="sdpa"
            )
        self.plain_loss = self._plain_loss(model)
        if run.lora:
            model = with_adapter(model, run.rank)
        fuse_layers(model, "liger" if run.fused else "none")
        self.handle: PatchHandle = patch(model.train(), run.config)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(trained, self.device)
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None:  # it remembers the first model's
            layer = decoder_layers(self.handle.model)[0]
            plugin.transformer_cls_names_to_wrap = [type(layer).__name__]
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self._collate = SequenceShardCollator(
            run.config, group_rank=self.handle.group_rank, pad_token_id=0
        )

    def _plain_loss(self, model: Any) -> float:
        row = random_row(CHECK_TOKENS, model.config.vocab_size)[None].to(self.device)
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=row.is_cuda)
        with torch.no_grad(), cast:
            return float(model(input_ids=row, labels=row).loss)

    def load(self, num_tokens: int) -> None:
        row = random_row(num_tokens, self.handle.model.config.vocab_size)
        batch = self._collate([{"input_ids": row}])
        self._batch = {name: value.to(self.device) for name, value in batch.items()}

    def loss(self) -> Tensor:
        loss: Tensor = self.model(**self._batch, use_cache=False).loss
        return loss

    def rehearse(self) -> Preflight | None:
        return preflight(self.handle, self.loss, self._accelerator.backward)

    def step(self) -> float:
        loss = self.loss()
        self._accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)

    def close(self) -> None:
        self.handle.unpatch()
        self._accelerator.free_memory()


def random_row(num_tokens: int, vocab_size: int) -> Tensor:
    """int64 `[N]`, the same in every process."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=generator)


def with_adapter(model: Any, rank: int) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    kind = LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, target_modules="all-linear")
    return get_peft_model(model, kind)


def measure(run: Run, accelerator: Any, hardware: str) -> Row:
    """Collective."""
    device, num_ranks = accelerator.device, accelerator.num_processes
    on_host = states_on_host(accelerator)
    result = run.predicted(f"{num_ranks}x{hardware}", offload_states=on_host)
    config = model_config(run.model, run.layers, max(run.tokens, CHECK_TOKENS))
    training = Training(run, config, accelerator)
    training.load(run.tokens)
    expected = training.rehearse() if run.rehearse else None
    training.load(CHECK_TOKENS)
    loss = training.step()
    if not abs(loss / training.plain_loss - 1) <= TOLERANCE[device.type]:
        raise AssertionError(f"loss {loss:.6g}, before patching {training.plain_loss:.6g}")
    training.load(run.tokens)
    for _ in range(run.warm_ups):
        training.step()
    seconds = []
    reset_peak(device)
    peak = 0
    for _ in range(run.steps):
        meet(device)
        started = perf_counter()
        loss = training.step()
        meet(device)
        seconds.append(perf_counter() - started)
        peak = max(peak, peak_bytes(device))
    kept = training.handle.checkpointing
    mine = kept.host_bytes + (bytes_of_states(training) if on_host else 0)
    peaks, host = zip(*everyone([peak, mine]), strict=True)
    measured_s = statistics.median(seconds)
    flops = result.job.step_flops * result.rows_at_once / num_ranks
    tiles = training.handle.mlp_tiles
    training.close()
    return {
        "run": run.text,
        "predicted_gib": result.memory.total / GIB,
        "measured_gib": max(peaks) / GIB or None,
        "preflight_gib": expected and expected.expected_bytes / GIB,
        "predicted_s": result.time.total,
        "measured_s": measured_s,
        "steps_s": seconds,
        "predicted_host_gib": result.host_bytes / GIB,
        "measured_host_gib": sum(host) / GIB,
        "mfu": flops / measured_s / result.job.cluster.hardware.peak_flops,
        "loss": loss,
        "policies": kept.policies,
        "predicted_policies": result.candidate.policies,
        "mlp_tiles": tiles,
        "kept_gib": expected and expected.kept_bytes / GIB,
        "components_gib": {name: x / GIB for name, x in result.memory.parts().items()},
        "parts_s": result.time.parts(),
    }


def bytes_of_states(training: Training) -> int:
    """Of host memory: what torch has pinned, for weights and gradients, and AdamW's states."""
    states = [
        value.to_local()
        for state in training.optimizer.state.values()
        for value in state.values()
        if hasattr(value, "to_local")
    ]
    assert all(tensor.device.type == "cpu" for tensor in states)
    pinned: int = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return pinned + sum(tensor.nbytes for tensor in states)


def mean_over_ranks(loss: Tensor) -> float:
    """Collective; waits for the step."""
    ranks = everyone(float(loss.detach()))
    return sum(ranks) / len(ranks)


def meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def one_process_group() -> dict[str, str]:
    """What torchrun exports to a single process, whose FSDP2 needs a group."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        on_host: bool = settings["states_on_host"]
        os.environ.update(one_process_group() if num_ranks == 1 else {})
        os.environ.update(launch_environment(num_ranks, states_on_host=on_host))
    runs = [Run.parse(text) for text in settings["runs"]]
    accelerator = make_accelerator(runs[0].config, mixed_precision="bf16" if on_gpu else "no")
    for run in runs:
        try:
            row = measure(run, accelerator, settings["hardware"])
        except torch.OutOfMemoryError as error:
            # Other ranks may have memory left and wait for this one: the launch ends here.
            print(f"OutOfMemoryError: {str(error).splitlines()[0][:200]}", flush=True)
            os._exit(1)
        if rank == 0:
            append_line(row, Path(settings["lines"]))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    close_accelerator(accelerator)


if __name__ == "__main__":
    main()
