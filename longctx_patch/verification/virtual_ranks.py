"""Compare a patched model on virtual ranks with the stock model, both in the calling process.

For a notebook: any model object, config and batch, and no launcher. `verify` compares processes
instead, and needs a model's config only.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.config import LongContextConfig
from longctx_patch.engine.groups import virtual_group
from longctx_patch.hf.call.stock_documents import check_one_document
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import run_torch_recurrences
from longctx_patch.hf.patching import patch
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import VirtualTransport, run_virtual_ranks
from longctx_patch.verification.cases import TOLERANCES
from longctx_patch.verification.proof import on_cpu
from longctx_patch.verification.reference import (
    Step,
    gradient_errors,
    mean_gradients,
    one_thread,
    train,
    worst_of,
)
from longctx_patch.verification.shrink import keep_float64

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True)
class VirtualParity:
    """One training step on virtual ranks against the same step of the stock model; print it."""

    loss: float
    """The loss of the whole rows: the ranks' value that is farthest from `stock_loss`."""
    stock_loss: float
    grad_rel_errs: Mapping[str, float]
    """Relative error of each trained parameter's gradient, by the parameter's name."""
    messages: int
    """The messages of all ranks."""
    bytes: int
    traffic_as_planned: bool
    """Whether each rank sent what its plans say, to the byte."""
    tolerance: float = TOLERANCES["float32"]

    @property
    def loss_rel_err(self) -> float:
        return abs(self.loss / self.stock_loss - 1)

    @property
    def worst_parameter(self) -> str:
        """The parameter whose gradient has the largest error; NaN is the largest."""
        return worst_of(self.grad_rel_errs)

    @property
    def ok(self) -> bool:
        """Says whether all errors are within the tolerance, and the traffic is as planned."""
        errors = (self.loss_rel_err, *self.grad_rel_errs.values())
        return self.traffic_as_planned and all(error <= self.tolerance for error in errors)

    def __str__(self) -> str:
        """A line for the loss and for each gradient, then the verdict."""
        lines = {"loss": self.loss_rel_err, **self.grad_rel_errs}
        width = max(map(len, lines))
        planned = "as planned" if self.traffic_as_planned else "NOT as planned"
        return "\n".join(
            [
                f"loss {self.loss:.7f}, stock {self.stock_loss:.7f}; relative errors:",
                *(f"{name:{width}}  {error:.1e}" for name, error in lines.items()),
                f"{self.messages} messages, {self.bytes} bytes, {planned}",
                f"{'equal' if self.ok else 'NOT equal'} to the stock model within "
                f"{self.tolerance:g}",
            ]
        )


def verify_on_virtual_ranks(
    model: nn.Module,
    config: LongContextConfig,
    batch: Mapping[str, Any],
    *,
    timeout_s: float = 300.0,
) -> VirtualParity:
    """Train one step of whole rows on virtual ranks, and compare it with the stock model.

    The ranks are threads of this process, and each patches a copy of the model. So this needs
    memory for one model more than there are ranks: try small models. The model itself stays as it
    is. A model in float64, and any with recurrent layers, computes everything in float64, within
    1e-10: of the gradients of decays float32 keeps few digits, in the stock model too.

    Args:
        model: a stock model on the CPU, in float32 or float64, without dropout; also one of PEFT.
        config: what to patch with; its `sequence_degree` is the number of ranks. A kernel that only
            GPUs have is replaced by the CPU's.
        batch: whole rows with `labels`, as for the model itself; of one document each where layers
            are recurrent, since the stock model keeps no others apart.
        timeout_s: the longest that a rank waits for another.

    Raises:
        UnsupportedModelError, ValueError: as `patch` does and as a patched model does of a batch;
            or the model is not as above.
        RuntimeError: a rank failed for another reason, which the text has.

    Example:
        >>> parity = verify_on_virtual_ranks(model, config, batch)  # doctest: +SKIP
        >>> print(parity)  # doctest: +SKIP
        >>> assert parity.ok  # doctest: +SKIP
    """
    dtype = _dtype(model)
    if _is_recurrent(model):
        check_one_document(batch)  # the stock model would carry states into the next one
    copies = [_fresh_copy(model, dtype) for _ in range(config.sequence_degree)]
    config = on_cpu(config)

    def on_one_rank(transport: VirtualTransport) -> Step:
        mine = copies[transport.group_rank]
        handle = patch(mine, config, group=virtual_group(transport, config))
        return _train(mine, batch, handle)

    with one_thread():
        try:
            ranks = run_virtual_ranks(config.sequence_degree, on_one_rank, timeout_s=timeout_s)
        except RuntimeError as error:
            if isinstance(error.__cause__, ValueError):  # a refusal, which all ranks raise alike
                raise error.__cause__ from None
            raise
        return _compare(ranks, _train(_fresh_copy(model, dtype), batch), TOLERANCES[dtype])


def _dtype(model: nn.Module) -> str:
    """The dtype of the comparison. Refuses what could not be compared; `patch` refuses the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: unfreeze some, to compare gradients.")
    kinds = {(p.device.type, p.dtype) for p in model.parameters()}
    (device, dtype), *others = sorted(kinds, key=lambda kind: (kind[1] in _DTYPES, str(kind)))
    if device != "cpu" or dtype not in _DTYPES or others:
        raise ValueError(
            f"parameters of {dtype} on {device}: virtual ranks compare on the CPU, all in float32 "
            "or all in float64. Give model.to('cpu', torch.float32)."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"dropout of {module.p} in {name}: ranks would draw other numbers than the stock "
                "model. Set it to 0 (lora_dropout=0 for an adapter)."
            )
    return "float64" if _is_recurrent(model) else _DTYPES[dtype]


def _is_recurrent(model: nn.Module) -> bool:
    return bool(transformers_api.recurrent_modules(transformers_api.causal_lm(model)))


def _fresh_copy(model: nn.Module, dtype: str) -> nn.Module:
    mine = copy.deepcopy(model).train()
    mine.zero_grad(set_to_none=True)
    run_torch_recurrences(transformers_api.causal_lm(mine))
    if dtype == "float64":
        for buffer in mine.buffers():  # rotary embeddings compute in float32, of transformers 5.17
            buffer.data = buffer.to(torch.float32) if buffer.is_floating_point() else buffer.data
        keep_float64(transformers_api.causal_lm(mine))
    return mine


def _train(model: nn.Module, batch: Mapping[str, Any], handle: PatchHandle | None = None) -> Step:
    dtype = next(model.parameters()).dtype
    given = {name: _in(value, dtype) for name, value in batch.items()}
    return train(model, {**given, "use_cache": False}, handle)


def _in(value: Any, dtype: torch.dtype) -> Any:
    """Casts a floating-point input, such as pixels, to the model's dtype."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _compare(ranks: Sequence[Step], stock: Step, tolerance: float) -> VirtualParity:
    sent = sum((rank.sent for rank in ranks), Traffic())
    return VirtualParity(
        loss=max((rank.loss for rank in ranks), key=lambda loss: abs(loss - stock.loss)),
        stock_loss=stock.loss,
        grad_rel_errs=gradient_errors(mean_gradients(ranks), stock),
        messages=sent.messages,
        bytes=sent.bytes,
        traffic_as_planned=all(rank.sent == rank.planned for rank in ranks),
        tolerance=tolerance,
    )
