"""How near `longctx plan` comes: a training run on these GPUs beside what was predicted of it.

    torchrun --nproc_per_node 2 benchmarks/predicted.py --hardware h200 --out predicted.jsonl \\
        llama-8b:layers=8,tokens=65536,ulysses=2,checkpoint=attention

A run is `model:option=value,...`: a name of benchmarks/model_shapes.py with random weights,
`tokens` of a row, and if you like `layers`, `lora`, `rank`, `dtype` (of the weights as loaded),
`fused` (Liger Kernel's layers), `rehearse`, `steps` and `warm_ups`; the others are fields of
LongContextConfig. It first makes a step on a small row, whose loss has to be that of the model
before it was patched. Memory is the most that torch's allocator had given out on a GPU, seconds the
median of the steps, and beside both is what `preflight` expected before the first step. A line of
JSON is added to --out and printed.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from config_text import options_of
from launch import free_port
from measure import Row, everyone, machine
from model_shapes import MODELS, model_config
from report import append_line
from runs import Run
from step_job import mean_over_ranks, meet, peak_bytes
from systems import make_optimizer
from systems.ours import launch_environment
from torch import Tensor
from transformers import AutoModelForCausalLM

from longctx_patch import PatchHandle, SequenceShardCollator, patch
from longctx_patch.choose.search import Result
from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.hf.preflight import preflight
from longctx_patch.plugin import close_accelerator, make_accelerator, states_on_host
from longctx_patch.predict.machines import GIB

CHECK_TOKENS = 2048
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}  # of the small row's loss; bfloat16 there, float32 here


class Training:
    """A patched model under FSDP2, and its optimizer, as the recipe makes them."""

    def __init__(self, run: Run, accelerator: Any) -> None:
        self.device, self.accelerator = accelerator.device, accelerator
        config = model_config(run.model, run.layers, max(run.tokens, CHECK_TOKENS))
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
        self.model, self.optimizer = accelerator.prepare(
            model, make_optimizer(trained, self.device)
        )
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

    def step(self) -> float:
        loss = self.loss()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)

    def check(self) -> None:
        """Make a step on a small row. Raises AssertionError for a loss that patching changed."""
        self.load(CHECK_TOKENS)
        loss = self.step()
        if not abs(loss / self.plain_loss - 1) <= TOLERANCE[self.device.type]:
            raise AssertionError(f"loss {loss:.6g}, before patching {self.plain_loss:.6g}")

    def timed_steps(self, steps: int) -> tuple[list[float], int]:
        """Seconds of each step, and the bytes that the allocator had given out at most."""
        seconds, peak = [], 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            meet(self.device)
            started = perf_counter()
            self.step()
            meet(self.device)
            seconds.append(perf_counter() - started)
            peak = max(peak, peak_bytes(self.device)[0])
        return seconds, peak

    def host_bytes(self) -> int:
        """Host memory of this process: checkpoints; pinned weights, gradients, AdamW's states."""
        kept = self.handle.checkpointing.host_bytes
        if not states_on_host(self.accelerator):
            return kept
        states = [
            value.to_local()
            for state in self.optimizer.state.values()
            for value in state.values()
            if hasattr(value, "to_local")
        ]
        pinned: int = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        return kept + pinned + sum(tensor.nbytes for tensor in states)


def random_row(num_tokens: int, vocab_size: int) -> Tensor:
    """int64 `[N]`, the same in every process."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=generator)


def with_adapter(model: Any, rank: int) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    kind = LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, target_modules="all-linear")
    return get_peft_model(model, kind)


def measure(run: Run, accelerator: Any, result: Result) -> Row:
    """The run beside its prediction. Collective."""
    training = Training(run, accelerator)
    training.load(run.tokens)
    rehearsed = None
    if run.rehearse:
        rehearsed = preflight(training.handle, training.loss, accelerator.backward)
    training.check()
    training.load(run.tokens)
    for _ in range(run.warm_ups):
        training.step()
    seconds, peak = training.timed_steps(run.steps)
    peaks, host = zip(*everyone([peak, training.host_bytes()]), strict=True)
    measured_s = statistics.median(seconds)
    return {
        "run": run.text,
        "predicted_gib": result.memory.total / GIB,
        "measured_gib": max(peaks) / GIB or None,
        "preflight_gib": rehearsed and rehearsed.expected_bytes / GIB,
        "predicted_s": result.time.total,
        "measured_s": measured_s,
        "steps_s": seconds,
        "predicted_host_gib": result.host_bytes / GIB,
        "measured_host_gib": sum(host) / GIB,
        "mfu": result.mfu * result.time.total / measured_s,
        "policies": training.handle.checkpointing.policies,
        "predicted_policies": result.candidate.policies,
        "mlp_tiles": training.handle.mlp_tiles,
        "components_gib": {name: x / GIB for name, x in result.memory.parts().items()},
        "parts_s": result.time.parts(),
    }


def set_environment(num_ranks: int, *, on_host: bool) -> None:
    """Export what `accelerate launch` does, and for one process what torchrun would: FSDP2 needs a
    group."""
    if num_ranks == 1:
        names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= launch_environment(num_ranks, states_on_host=on_host)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="model:option=value,...")
    parser.add_argument("--out", type=Path, required=True, help="file that gets another line")
    parser.add_argument("--hardware", default="h200", help="kind of GPU to predict for (h200)")
    parser.add_argument("--states-on-host", action="store_true", help="weights and optimizer there")
    parsed = parser.parse_args(arguments)
    if parsed.states_on_host and not torch.cuda.is_available():
        parser.error("--states-on-host: FSDP2 moves states from a GPU, and there is none.")
    name, _, options = parsed.run.partition(":")
    if name not in MODELS:
        parser.error(f"{parsed.run}: name one of {', '.join(MODELS)}.")
    try:
        if "tokens" not in options_of(options):
            parser.error(f"{parsed.run}: say tokens=, the length of a row.")
        parsed.run = Run.parse(parsed.run)
    except ValueError as error:
        parser.error(str(error))
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    num_ranks, on_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    if on_gpu:
        set_environment(num_ranks, on_host=arguments.states_on_host)
    gpus = f"{num_ranks}x{arguments.hardware}"
    result = arguments.run.predicted(gpus, offload_states=arguments.states_on_host)
    mixed_precision = "bf16" if on_gpu else "no"
    accelerator = make_accelerator(arguments.run.config, mixed_precision=mixed_precision)
    row = measure(arguments.run, accelerator, result)
    if accelerator.is_main_process:
        row |= {"num_ranks": num_ranks, "machine": machine(accelerator.device)}
        append_line(row, arguments.out)
        print(json.dumps(row, indent=1), file=sys.stdout)
    close_accelerator(accelerator)


if __name__ == "__main__":
    main()
