"""The peer of step.sh: a training step under Accelerate's own context parallelism (FSDP2, torch).

torchrun --nproc_per_node 4 benchmarks/accelerate_context_parallel.py CONFIG --seq-len 131072

Same model, dtype, optimizer and full checkpointing as the recipe; random tokens. Prints a JSON line
per step: step, seconds, tokens_per_second_per_device, peak_memory_bytes, loss.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--rotation", choices=("allgather", "alltoall"), default="allgather")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    accelerator = Accelerator(
        mixed_precision="bf16",
        parallelism_config=ParallelismConfig(
            cp_size=world_size,
            cp_handler=TorchContextParallelConfig(cp_comm_strategy=arguments.rotation),
        ),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            activation_checkpointing=True,
        ),
    )
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(arguments.config)
    with accelerator.device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(config.vocab_size, (1, arguments.seq_len), device=accelerator.device)
    dist.broadcast(tokens, 0)
    for step in range(1, arguments.steps + 1):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        loss = train_step(accelerator, model, optimizer, tokens)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        line = {
            "step": step,
            "seconds": seconds,
            "tokens_per_second_per_device": arguments.seq_len / seconds / world_size,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(),
            "loss": accelerator.reduce(loss, "mean").item(),
        }
        accelerator.print(json.dumps(line), flush=True)
    accelerator.end_training()


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """One step over all tokens; the buffers are cut over the ranks in place."""
    ids = tokens.clone()
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    buffers = [ids, positions, labels]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
    ):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    main()
