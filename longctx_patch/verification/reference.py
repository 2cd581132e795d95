"""What one unpatched process computes, on whole rows."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.loss import IGNORE_INDEX
from longctx_patch.verification.shrink import build_small_model

Rows = list[dict[str, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one unpatched process computes. Gradients and logits in the model's dtype."""

    loss: float
    logits_BLV: Tensor
    grads: dict[str, Tensor]


def make_rows(vocab_size: int, seq_len: int) -> Rows:
    """Two rows of random tokens: one without loss in its first part, as after a long prompt (so
    some ranks hold no label of it), and a shorter one, which gets padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (2, seq_len), generator=generator).tolist()
    prompt = seq_len * 2 // 5
    first = {"input_ids": tokens[0], "labels": [IGNORE_INDEX] * prompt + tokens[0][prompt:]}
    return [first, {"input_ids": tokens[1][: max(2, seq_len * 3 // 4)]}]


def compute_reference(small_config: Any, rows: Rows, dtype: str) -> Reference:
    """One step of the unpatched model over whole rows, with the loss written out."""
    model = build_small_model(small_config, getattr(torch, dtype))
    length = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, fill: int) -> Tensor:
        values = [row.get(key, row["input_ids"]) for row in rows]
        return torch.tensor([row + [fill] * (length - len(row)) for row in values])

    logits = model(input_ids=padded("input_ids", 0), use_cache=False).logits
    labels = padded("labels", IGNORE_INDEX)
    loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX
    )
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(loss=loss.item(), logits_BLV=logits.detach(), grads=grads)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())
