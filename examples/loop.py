"""A training loop of your own with Accelerate, with each sequence cut over all processes.

    torchrun --nproc_per_node 2 examples/loop.py     # two CPU processes, or two GPUs
    torchrun --nproc_per_node 2 examples/loop.py --packed

A tiny Llama learns one row of 1,021 tokens or, with `--packed`, rows of 512 tokens that are packed
from many documents, which don't see each other. Before patching, transformers computes the loss of
the first row's documents one by one. The patched model must give the same loss for the whole row,
cut over any number of processes.
"""

import os
import sys

import torch
from accelerate.utils import send_to_device
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from longctx_patch import (
    LongContextConfig,
    SequenceShardCollator,
    close_accelerator,
    make_accelerator,
    pack_rows,
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
# Any lengths will do; packed documents have 1 to 205 tokens.
LENGTHS = [1 + 131 * n % 211 for n in range(30)] if "--packed" in sys.argv else [1021]
DOCUMENTS = [
    {"input_ids": [(7 * t + t * t // 5 + n) % TINY.vocab_size for t in range(length)]}
    for n, length in enumerate(LENGTHS)
]


def main() -> None:
    config = LongContextConfig(ring_degree=int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = make_accelerator(config)
    set_seed(0)
    model = LlamaForCausalLM(TINY).to(accelerator.device)
    seq_len = 512 if len(DOCUMENTS) > 1 else 1021
    packed = pack_rows(DOCUMENTS, seq_len)
    rows = list(packed)  # the same on every rank
    accelerator.print(f"{packed.num_documents} documents, rows {packed.efficiency:.1%} full")
    documents = rows[0]["input_ids"].to(accelerator.device).split(rows[0]["seq_lengths"])
    stock_loss = loss_of_documents(model, documents)

    handle = patch(model, config)
    collate = SequenceShardCollator(
        config, group_rank=handle.group_rank, pad_token_id=0, pad_to_length=seq_len
    )
    model.train()  # from_pretrained returns a model in evaluation mode, which keeps all activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    # Each row has other documents and so other plans, which are made during the step before it.
    for batch in handle.plan_ahead(collate([row]) for row in rows * (5 // len(rows) or 1)):
        # This process's share of the mean over all tokens.
        loss = model(**send_to_device(batch, accelerator.device)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    handle.unpatch()

    accelerator.print(f"{accelerator.num_processes} processes, losses {losses}")
    accelerator.print(f"documents of the first row, each alone, before training: {stock_loss}")
    if abs(losses[0] / stock_loss - 1) > 1e-5:
        raise SystemExit("the first loss is not that of the unpatched model")
    close_accelerator(accelerator)


def loss_of_documents(model: LlamaForCausalLM, documents: tuple[torch.Tensor, ...]) -> float:
    """The mean loss of all tokens with a next token in their document, by transformers alone."""
    learnt = [ids[None] for ids in documents if len(ids) > 1]
    sums = [model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in learnt]
    return sum(sums) / sum(ids.shape[1] - 1 for ids in learnt)


if __name__ == "__main__":
    main()
