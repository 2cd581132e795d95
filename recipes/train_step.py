"""One optimizer step over several micro batches, which changes nothing unless its numbers are
finite."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from longctx_patch.hf.handle import evaluation_mode
from longctx_patch.loss.law import IGNORE_INDEX


def run_batches(
    accelerator: Any, model: Any, batches: list[Any], tokens: int, *, averages: bool = True
) -> torch.Tensor:
    """Forward and backward of every micro batch; returns this process's share of the mean loss over
    the `tokens` of the step. `averages`: whether gradients are averaged over processes at the end,
    which under FSDP2 they always are."""
    loss = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches, start=1):
        is_last = averages and number == len(batches)
        with gradients_stay_local(accelerator, model, until_last=not is_last):
            part = model(**batch, num_valid_tokens=tokens, use_cache=False).loss
            accelerator.backward(part)
        loss += part.detach()
    return loss


def evaluate(accelerator: Any, model: Any, batches: Iterable[Any]) -> dict[str, Any]:
    """The mean loss over all labels of the evaluation rows: the sum over all processes, divided by
    their number. Collective; `batches` are this process's. A router's loss is no part of it."""
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    options: dict[str, Any] = {"num_valid_tokens": 1, "use_cache": False}
    if getattr(accelerator.unwrap_model(model).config, "output_router_logits", False):
        options["output_router_logits"] = False
    with evaluation_mode(model):
        for batch in batches:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            total[0] += model(**batch, **options).loss.double()
            total[1] += (batch["shift_labels"] != IGNORE_INDEX).sum()
    shares, tokens = accelerator.reduce(total).tolist()
    # The mean of the processes' shares is the sum of the losses, of which there is one token.
    return {"eval_loss": shares / accelerator.num_processes / tokens, "eval_tokens": int(tokens)}


def gradients_stay_local(
    accelerator: Any, model: Any, *, until_last: bool
) -> AbstractContextManager[Any]:
    """Skip DDP's all-reduce before the last micro batch. Not under FSDP2, which would then keep
    unsharded gradients."""
    if until_last and not accelerator.is_fsdp2:
        return accelerator.no_sync(model)
    return nullcontext()
