"""A sentinel: a short slice of the data, computed over the ranks of a group and by one rank alone.

The first step of a run is checked message by message; the sentinel looks again every so many steps,
with the weights of that moment. Each rank computes the log-probability of every token of the slice
by itself, on the model's stock path, and together with its group on the path that training takes.
The slice is the beginning of one document. As no token sees a later one, it is a row of its own,
and both ways have the same exact result: they differ by rounding alone. Backward is not compared.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.hf.handle import PatchHandle, evaluation_mode
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.random_state import RandomState
from longctx_patch.rules.together import of_all_ranks

TOKENS = 512
"""Length of a slice, at most."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By the dtype in which attention is computed: at least ten times what tests have seen."""


class DriftError(RuntimeError):
    """Ranks that share a row computed other numbers than one of them alone."""


class Sentinel:
    """Compares both ways for one patched model.

    Args:
        handle: of the patched model.
        model: the module that the loop trains, where it wraps the patched model (DDP, FSDP2, PEFT).

    Example:
        >>> sentinel = Sentinel(handle, model)  # doctest: +SKIP
        >>> print(sentinel.check(ids))  # doctest: +SKIP
    """

    def __init__(self, handle: PatchHandle, model: nn.Module | None = None) -> None:
        self._handle, self._model = handle, model or handle.model

    def check(self, ids: Tensor) -> float:
        """Compare both ways on the first `TOKENS` of a document. Collective over all processes:
        those of one sequence group give the same document. Weights, gradients and random numbers
        stay as they are.

        Args:
            ids: `[L]` int64, at least 2 tokens.

        Returns:
            On the rank where it is largest: the root mean square of the differences of
            log-probabilities, over that of these, or over 1 where theirs is less.

        Raises:
            DriftError: on all ranks, if that is beyond the bound.
        """
        model = self._model
        device = next(model.parameters()).device
        row = ids[None, :TOKENS].to(computing_device(device))
        with evaluation_mode(model), RandomState.now(row.device).replayed():
            alone, dtype = self._alone(row)
            rows = {"input_ids": row, "labels": row}
            shared = self._handle.token_log_probs(rows, model=model)
        everyones = of_all_ranks((_error(alone, shared), BOUNDS[dtype]))
        errors, bound = [error for error, _ in everyones], max(bound for _, bound in everyones)
        rank = max(range(len(errors)), key=lambda n: (math.isnan(errors[n]), errors[n]))
        if not errors[rank] <= bound:  # so for NaN
            raise DriftError(
                f"the sharded model's log-probabilities differ by {errors[rank]:.1e} on rank "
                f"{rank} from those of this rank alone, beyond the bound of {bound:g}. `longctx "
                "verify` and `longctx doctor` say whether the model, a kernel or a device is at "
                "fault; checkpoints from before it are sound."
            )
        return errors[rank]

    def _alone(self, row: Tensor) -> tuple[Tensor, torch.dtype]:
        """`[1, L - 1]` log-probabilities on the stock path, and the dtype of attention there."""
        dtypes: list[torch.dtype] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            dtypes.append((output[0] if isinstance(output, tuple) else output).dtype)

        hook = transformers_api.attention_modules(self._handle.model)[0].register_forward_hook(note)
        try:
            logits = self._model(input_ids=row, use_cache=False).logits[:, :-1]
        finally:
            hook.remove()
        scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        return scores.gather(-1, row[:, 1:, None]).squeeze(-1), dtypes[0]


def _error(alone: Tensor, shared: Tensor) -> float:
    size = alone.square().mean().sqrt().clamp(min=1)
    return float((alone - shared).square().mean().sqrt() / size)


def computing_device(of_weights: torch.device) -> torch.device:
    """The device of inputs; weights may lie on the host (FSDP2's CPU offload)."""
    if of_weights.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return of_weights
