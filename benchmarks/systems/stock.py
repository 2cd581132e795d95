"""transformers on one GPU: its own model, torch's attention, checkpointing of every layer.

Options: `kernel` (cudnn, flash, any), `checkpoint` (full, none), `liger`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from systems import Job, NotCovered, TorchTrained, make_optimizer, mean_loss, next_tokens, take
from systems.model import checkpoint_layers, use_options

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def build(job: Job, model: PreTrainedModel, options: dict[str, Any]) -> "Stock":
    if job.num_ranks > 1:
        raise NotCovered("it runs on one GPU")
    chosen = take(
        options,
        kernel=("cudnn", "flash", "any"),
        checkpoint=("full", "none"),
        liger=(False, True),
    )
    return Stock(job, model, chosen)


class Stock(TorchTrained):
    def __init__(self, job: Job, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.model = model
        self._kernel = options["kernel"] if job.device.type == "cuda" else "any"
        use_options(model, liger=options["liger"])
        if options["checkpoint"] == "full":
            checkpoint_layers(model)
        self.optimizer = make_optimizer(model.parameters(), job.device)

    def _attention(self) -> AbstractContextManager[Any]:
        """Choose torch's attention kernel; entered around backward too, where layers run again."""
        return sdpa_kernel(KERNELS[self._kernel]) if self._kernel in KERNELS else nullcontext()

    def loss(self) -> Tensor:
        with self._attention():
            logits = self.model(input_ids=self._row, use_cache=False).logits
            return mean_loss(logits, next_tokens(self._row), self._row.shape[1], 1)

    def backward(self, loss: Tensor) -> None:
        with self._attention():
            loss.backward()

    def close(self) -> None:
        pass
