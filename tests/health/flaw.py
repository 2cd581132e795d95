"""Models whose numbers go wrong in one batch of a run, each time that it is computed."""

import math
from typing import Any

from torch import Tensor, nn


class Flaw:
    """Makes one place of a model NaN, or `factor` times what it is, for the batches of some
    numbers, from 1, in order of their first appearance in training."""

    def __init__(
        self, model: Any, place: str, batches: set[int], *, factor: float = math.nan
    ) -> None:
        """`place`: `loss`, the name of a module whose output is spoilt, or of a weight whose
        gradient is."""
        self._batches, self._seen, self._is_on = batches, list[bytes](), False
        self._factor = factor
        model.register_forward_pre_hook(self._begins, with_kwargs=True)
        if place == "loss":
            model.register_forward_hook(self._loss)
        elif place.endswith(".weight"):
            model.get_parameter(place).register_hook(self._spoilt)
        else:
            model.get_submodule(place).register_forward_hook(lambda *_: self._spoilt(_[-1]))

    def _begins(self, model: nn.Module, _: Any, batch: dict[str, Any]) -> None:
        if model.training:
            ids = batch["input_ids"].cpu().numpy().tobytes()
            if ids not in self._seen:
                self._seen.append(ids)
            self._is_on = self._seen.index(ids) + 1 in self._batches

    def _loss(self, _: nn.Module, __: Any, output: Any) -> Any:
        output.loss = self._spoilt(output.loss)
        return output

    def _spoilt(self, tensor: Tensor) -> Tensor:
        return tensor * self._factor if self._is_on else tensor
