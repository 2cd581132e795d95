"""Does once, or on the device, what transformers' loop repeats on the host in each forward.

A model of 32 layers has 420 modules. Going through them to switch each to training, and again to
count parameters, takes 1.7 ms each; reading each loss makes a GPU run dry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longctx_patch.hf.handle import PatchHandle

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class EachForwardMixin(_Trainer):
    """The overrides around a forward: nothing that it computes or logs is another number."""

    long_context_handle: PatchHandle
    _in_training: tuple[nn.Module, ...] = ()
    """The modules of the model that is trained, itself the first."""
    _flops_per_token = 0
    _filters_log = False
    """Whether losses that are not finite are left out of the log, as the arguments ask for."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._in_training, self._flops_per_token = (), 0
        self._filters_log = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False
        try:
            return super().train(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = self._filters_log

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._switched_once(model):
            loss: Tensor = super().training_step(model, *args, **kwargs)
        if not self._filters_log:
            return loss
        # As transformers has it, without a wait of the host: the mean of the losses before.
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, self._tr_loss / steps)

    @contextmanager
    def _switched_once(self, model: nn.Module) -> Iterator[None]:
        """Let transformers' `model.train()` do nothing where each module is in training already."""
        if not self._in_training or self._in_training[0] is not model:
            self._in_training = tuple(model.modules())
        if not all(module.training for module in self._in_training):
            yield
            return

        def first(mode: bool = True) -> nn.Module:
            del model.train
            return model if mode else model.train(mode)

        model.train = first  # type: ignore[method-assign]  # hides the method of its class
        try:
            yield
        finally:
            vars(model).pop("train", None)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """This rank's share of a batch: the sum over the ranks of a group is one process's."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs[name].numel() if name in inputs else 0
        if tokens and not self._flops_per_token:
            self._flops_per_token = super().floating_point_ops(inputs) // tokens
        return self._flops_per_token * tokens / self.long_context_handle.config.sequence_degree
