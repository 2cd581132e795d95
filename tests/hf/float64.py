"""Virtual ranks against the stock model in float64, over every kind of degrees and policies; and a
step of the stock model in which each document of a row is computed by itself."""

import copy
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.verification.shrink import keep_float64
from tests.hf.steps import Step, complaints, nothing, step_of_ranks
from tests.hf.tiny import VOCABULARY, featured_model, gradients, token_rows

TOKENS = 37

WAYS: list[dict[str, Any]] = [
    {"ring_degree": 2, "checkpoint": "none"},
    {"ring_degree": 3, "checkpoint": "full", "layout": "contiguous"},
    {"ring_degree": 4, "checkpoint": "attention"},
    {"ulysses_degree": 4, "checkpoint": "attention"},
    {"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "offload"},
    {"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "attention", "attention_kept": 0.5},
]


def padded_rows() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :13] = -100
    labels[1, 20:] = -100
    mask[1, 20:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed_row() -> dict[str, Tensor]:
    batch = {name: value[:1] for name, value in padded_rows().items() if name != "attention_mask"}
    batch["position_ids"] = torch.cat([torch.arange(length) for length in (3, 19, 15)])[None]
    batch["labels"][0, [0, 3, 22]] = -100
    return batch


def in_float64(family: str) -> Any:
    """A model with the same weights each time."""
    model: Any = featured_model(family)
    keep_float64(model)
    return model


def backward(loss: Tensor, model: Any) -> dict[str, Tensor]:
    """The loss and every gradient."""
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def stock_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the stock model from its logits, since its own loss rounds to float32."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def assert_exact(
    model: Any,
    config: LongContextConfig,
    batch: dict[str, Tensor],
    check: Callable[[PatchHandle], None] = nothing,
) -> set[str]:
    """Compare virtual ranks with the stock model; returns the names of the trained parameters."""
    found = step_of_ranks(model, config, batch, check)
    wanted = copy.deepcopy(model)
    loss = stock_loss(wanted, batch)
    loss.backward()
    where = model.config.model_type, config
    assert not complaints(found, Step(loss.detach(), gradients(wanted)), where, bound=1e-10)
    return set(found.grads)


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


def documents_padded(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The same documents, one in each row."""
    whole = whole_row(lengths)
    parts = {name: list(whole[name][0].split(lengths)) for name in ("input_ids", "labels")}
    parts["attention_mask"] = [torch.ones_like(part) for part in parts["input_ids"]]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=fill[name])
        for name, rows in parts.items()
    }
