"""Learn how to write a training loop with Accelerate, on rows packed of documents.

    torchrun --standalone --nproc_per_node 2 examples/loop.py     # on two GPUs or on a CPU

A tiny random Llama learns rows of 512 tokens, each cut over all processes. Documents of a row don't
see each other. Before patching, transformers computes the loss of the first row's documents one by
one; the script ends with an error if the patched model's loss of the whole row differs.
"""

import os

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

SEQ_LEN = 512
TINY = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def loss_of_each_alone(model: LlamaForCausalLM, documents: tuple[torch.Tensor, ...]) -> float:
    """The mean loss of all tokens with a next token in their document, by transformers alone."""
    learned = [ids[None] for ids in documents if len(ids) > 1]
    sums = [model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in learned]
    return sum(sums) / sum(ids.shape[1] - 1 for ids in learned)


config = LongContextConfig(ring_degree=int(os.environ.get("WORLD_SIZE", "1")))
accelerator = make_accelerator(config)
set_seed(0)  # the same weights and rows on every process
model = LlamaForCausalLM(TINY).to(accelerator.device)
documents = [{"input_ids": (7 * torch.arange(1 + 131 * n % 411) + n) % 128} for n in range(20)]
packed = pack_rows(documents, SEQ_LEN)
rows = list(packed)
accelerator.print(f"{len(documents)} documents, rows {packed.efficiency:.1%} full")
first = torch.as_tensor(rows[0]["input_ids"], device=accelerator.device)
loss_before = loss_of_each_alone(model, first.split(rows[0]["seq_lengths"]))

handle = patch(model, config)
collate = SequenceShardCollator(
    config, group_rank=handle.group_rank, pad_token_id=0, pad_to_length=SEQ_LEN
)
model.train()  # from_pretrained returns a model in evaluation mode, which keeps all activations
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
# Each row has other documents and so other plans, which are made during the step before it.
for batch in handle.plan_ahead(collate([row]) for row in rows):
    loss = model(**send_to_device(batch, accelerator.device)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    # `loss` is this process's share of the mean over all tokens.
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"loss {losses[-1]:.6f}")
handle.unpatch()

if abs(losses[0] / loss_before - 1) > 1e-5:
    raise SystemExit(f"the first loss is not that of the unpatched model, {loss_before}")
close_accelerator(accelerator)
