"""One optimizer step over several micro batches, which changes nothing unless its numbers are
finite."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from longctx_patch.checkpoints.signals import StopSignals
from longctx_patch.checkpoints.train_state import TrainState
from longctx_patch.health.finite import FiniteSteps
from longctx_patch.health.where import Pass, source_of
from longctx_patch.hf.handle import evaluation_mode
from longctx_patch.loss.law import IGNORE_INDEX, count_valid_tokens
from longctx_patch.memory.random_state import RandomState
from longctx_patch.recipes.metrics import peak_memory_bytes


def train_step(
    accelerator: Any,
    state: TrainState,
    batches: list[Any],
    *,
    steps: FiniteSteps,
    max_grad_norm: float,
    rows: Callable[[], list[str]],
    stop: StopSignals,
) -> dict[str, Any]:
    """Train on all micro batches of a step; returns the line for metrics.jsonl.

    Args:
        stop: after the step all ranks agree whether one of them was asked to stop.
        rows: says which rows each of the micro batches has.

    Raises:
        BadStepError: on all ranks, for a step with bad numbers where none may be skipped any more.
            `state` is that after the step before.
    """
    started = time.perf_counter()
    batches = [{name: value.to(accelerator.device) for name, value in b.items()} for b in batches]
    tokens = count_valid_tokens(batches)
    random = RandomState.now(accelerator.device)
    loss = run_batches(accelerator, state.model, batches, tokens)
    trained = [p for p in state.model.parameters() if p.requires_grad]
    grad_norm = accelerator.clip_grad_norm_(trained, max_grad_norm or float("inf"))
    learning_rate = state.optimizer.param_groups[0]["lr"]

    def explain() -> str:
        passes = [
            Pass(
                partial(run_batches, accelerator, state.model, [batch], tokens, averages=False),
                said,
            )
            for batch, said in zip(batches, rows(), strict=True)
        ]
        return source_of(state.model, passes, random)

    # Waits for the whole step.
    numbers = steps.step(loss, grad_norm, explain, step=state.step + 1)
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    mine = [peak_memory_bytes(loss.device), stop.asked]
    mine_tensor = torch.tensor(mine, dtype=torch.float64, device=loss.device)
    peak_bytes, stop.agreed = map(int, accelerator.gather(mine_tensor).view(-1, 2).amax(0).tolist())
    tokens_per_second = tokens / (time.perf_counter() - started)
    skipped = {} if numbers.is_applied else {"skipped": numbers.problem}
    return {
        "step": state.step,
        "loss": numbers.loss,
        "grad_norm": numbers.grad_norm,
        "learning_rate": learning_rate,
        "tokens": tokens,
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / accelerator.num_processes,
        "peak_memory_bytes": peak_bytes,
        **skipped,
    }


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
