"""A row of documents, and a step of the stock model in which each document is computed by itself.

The reference for layers whose own path carries a state, or counts, from the start of the row.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.hf.steps import Step
from tests.hf.tiny import gradients, token_rows


def whole_row(lengths: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    """One row; positions say where its documents begin."""
    (row,) = token_rows(sum(lengths), num_rows=1)
    ids = torch.tensor([row["input_ids"]], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def stock_step(model: Any, lengths: tuple[int, ...]) -> Step:
    """The mean loss over all predicted tokens, with logits in the order of the row."""
    row = whole_row(lengths, model.device.type)["input_ids"]
    losses, logits = [], []
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        ids = row[:, start:stop]
        # A single token predicts nothing, and backward of causal-conv1d doesn't take one.
        with torch.set_grad_enabled(stop - start > 1):
            found = model(input_ids=ids, use_cache=False).logits
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        losses.append(F.cross_entropy(found[0, :-1], ids[0, 1:], reduction="sum"))
        logits.append(found.detach())
    loss = torch.stack(losses).sum() / (sum(lengths) - len(lengths))
    loss.backward()
    return Step(loss.detach(), gradients(model), torch.cat(logits, dim=1))


def padded_rows(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The same documents, one in each row."""
    whole = whole_row(lengths)
    parts = {name: list(whole[name][0].split(lengths)) for name in ("input_ids", "labels")}
    parts["attention_mask"] = [torch.ones_like(part) for part in parts["input_ids"]]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=fill[name])
        for name, rows in parts.items()
    }
