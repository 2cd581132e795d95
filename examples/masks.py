"""Learn how to give attention masks of your own, and how little each sends between ranks.

    python examples/masks.py

Four virtual ranks in one process are compared with dense attention. A rank gets only the keys that
its queries see, so the printed bytes show how sparse each mask is.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx_patch import (
    Documents,
    LongContextConfig,
    SequenceGroup,
    attention,
    masks,
    run_virtual_ranks,
    virtual_group,
)

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 16
RANKS, WINDOW, BLOCK = 4, 24, 16


def show(name: str, allowed: Tensor, **options: Any) -> None:
    """Compare attention over the ranks with the dense one; print what was sent."""
    q, k, v = (torch.randn(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    row = options.get("documents", TOKENS)

    def on_one_rank(ranks: Any) -> tuple[SequenceGroup, Tensor]:
        group = virtual_group(ranks, LongContextConfig(ring_degree=RANKS))
        shards = [group.layout(row).shard(x, group.group_rank, dim=1) for x in (q, k, v)]
        out, _lse = attention(*shards, group=group, num_tokens=TOKENS, **options)
        return group, out

    groups, outs = zip(*run_virtual_ranks(RANKS, on_one_rank), strict=True)
    whole = groups[0].layout(row).unshard(outs, 1)
    error = (whole - dense(q, k, v, allowed, options)).abs().max().item()
    sent = sum(group.counters.bytes for group in groups)
    print(f"{name:14} {allowed.sum():6} pairs, {sent:6} bytes sent, largest error {error:.0e}")
    if error > 1e-5:
        raise SystemExit(f"{name}: not dense attention")


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention in one process, by its definition; all tensors are `[1, L, H, D]`."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * HEAD_DIM**-0.5
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if (sinks := options.get("sinks")) is not None:  # one more key, whose value is 0
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, HEADS, TOKENS, 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., :TOKENS]  # padding sees nothing
    return torch.einsum("bhlm,bmhd->blhd", weights, v)


torch.manual_seed(0)
query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
causal = key <= query
show("causal", causal)
show("window", causal & (query - key < WINDOW), window=WINDOW)

blocks = np.eye(TOKENS // BLOCK, dtype=bool)
blocks[:, 0] = True  # every block of queries sees the first block of keys and its own
table = torch.from_numpy(blocks)[query // BLOCK, key // BLOCK]
show("block-sparse", causal & table, mask=masks.block_sparse(TOKENS, blocks, BLOCK))

number = torch.tensor([0] * 100 + [1] + [2] * 80 + [3] * 60 + [4] * 15)  # 4 is padding
same = (number[:, None] == number[None, :]) & (number < 4)[None, :]
show("documents", causal & same, documents=Documents((100, 1, 80, 60), TOKENS))
show("sinks, softcap", causal, sinks=torch.randn(HEADS), softcap=5.0)
