"""Packed documents: rows of many documents that don't see each other, cut over all processes.

    torchrun --nproc_per_node 2 examples/packed_documents.py     # two CPU processes, or two GPUs

Documents of 1 to 205 tokens fill rows of 512. Before patching, the loss of the first row is that of
its documents, one by one; the patched model must give the same for the row as a whole.
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
from longctx_patch.data.packing import PackedRow

SEQ_LEN = 512
LENGTHS = [1 + 131 * n % 211 for n in range(30)]
DOCUMENTS = [{"input_ids": [(7 * t + n) % 128 for t in range(k)]} for n, k in enumerate(LENGTHS)]
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
    packed = pack_rows(DOCUMENTS, SEQ_LEN)
    rows = list(packed)  # the same on every rank
    count = packed.num_documents
    accelerator.print(f"{count} documents in {len(rows)} rows, {packed.efficiency:.1%} full")
    alone = loss_of_documents(model, rows[0], accelerator.device)

    handle = patch(model, config)
    collate = SequenceShardCollator(
        config, group_rank=handle.group_rank, pad_token_id=0, pad_to_length=SEQ_LEN
    )
    model.train()  # from_pretrained returns a model in evaluation mode, which keeps all activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    # Each row has documents, so plans, of its own: made beside the step before it.
    for batch in handle.plan_ahead(collate([row]) for row in rows):
        loss = model(**send_to_device(batch, accelerator.device)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    accelerator.print(f"{accelerator.num_processes} processes, losses {losses}")
    accelerator.print(f"documents of the first row, each alone, before training: {alone}")
    if abs(losses[0] / alone - 1) > 1e-5:
        raise SystemExit("the first loss is not that of the documents alone")
    close_accelerator(accelerator)


def loss_of_documents(model: LlamaForCausalLM, row: PackedRow, device: torch.device) -> float:
    """The mean over all tokens that have a next one in their document, by transformers alone."""
    total, count = 0.0, 0
    for ids in row["input_ids"].to(device).split(row["seq_lengths"]):
        if len(ids) > 1:
            total += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
            count += len(ids) - 1
    return total / count


if __name__ == "__main__":
    main()
