"""Import and patch: a training loop of your own, with each sequence cut over all processes.

    torchrun --nproc_per_node 2 examples/import_and_patch.py     # two CPU processes, or two GPUs

A tiny Llama learns one row of 1,021 tokens. Before patching, the loss of the whole row is computed
as transformers does it; the patched model must give the same, cut over any number of processes.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from longctx_patch import (
    LongContextConfig,
    SequenceShardCollator,
    close_accelerator,
    make_accelerator,
    patch,
)

TINY = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    config = LongContextConfig(ring_degree=int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = make_accelerator(config)
    set_seed(0)
    model = LlamaForCausalLM(TINY).to(accelerator.device)
    row = [(7 * n + n * n // 5) % TINY.vocab_size for n in range(1021)]  # any length will do
    whole = torch.tensor([row], device=accelerator.device)
    stock_loss = model(input_ids=whole, labels=whole).loss.item()

    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    model.train()  # from_pretrained returns a model in evaluation mode, which keeps all activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(5):
        batch = {
            name: part.to(accelerator.device)
            for name, part in collate([{"input_ids": row}]).items()
        }
        loss = model(**batch).loss  # this process's share of the mean over all tokens
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    handle.unpatch()

    accelerator.print(f"{accelerator.num_processes} processes, losses {losses}")
    accelerator.print(f"unpatched, before training: {stock_loss}")
    if abs(losses[0] / stock_loss - 1) > 1e-5:
        raise SystemExit("the first loss is not that of the unpatched model")
    close_accelerator(accelerator)


if __name__ == "__main__":
    main()
