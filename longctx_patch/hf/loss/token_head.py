"""A head that returns something else than logits of all tokens, in one pass.

Under FSDP2 the head's whole weight exists only while the head itself runs, so its instance gets
another forward for the time of the pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

from torch import Tensor, nn
from transformers.utils import ModelOutput


@dataclass
class TokenFields(ModelOutput):
    """What a model returns of tokens' labels: `[B, L]` of a shard, `[B, L - 1]` of whole rows, 0
    where there is no label; fields that are not wanted are None.

    Their names and meanings are those of TRL's `FusedCausalLMOutput`.
    """

    loss: Tensor | None = None
    """A scalar."""
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    """A scalar: the router's loss."""


class StandIn:
    """Another forward for a model's head, until `end`."""

    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None

    def begin(
        self, head: nn.Module, forward: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    ) -> None:
        """Run the head as `forward(own, hidden)`, where `own` is its own forward."""
        own, before = head.forward, vars(head).get("forward")
        vars(head)["forward"] = MethodType(lambda _, hidden: forward(own, hidden), head)

        def end() -> None:
            if before is None:
                del vars(head)["forward"]
            else:
                vars(head)["forward"] = before

        self._end = end

    def end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
