"""A head that returns something else than logits of all tokens, in one pass.

Under FSDP2 the head's whole weight exists only while the head itself runs, so its instance gets
another forward for the time of the pass. Unlike the loss inside the head (`lm_head.py`) this goes
for every kind of head, adapters around it included: the stand-in calls the head's own forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from longctx_patch.hf.call.gather import ChosenTokens
from longctx_patch.loss.token_log_probs import label_scores


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

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._end: Callable[[], None] | None = None

    def begin(self, forward: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        """Run the head as `forward(own, hidden)`, where `own` is its own forward."""
        head = self._model.get_output_embeddings()
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


def begin_chosen(stand_in: StandIn, chosen: ChosenTokens) -> None:
    """Let the head make the logits of a rank's chosen tokens alone, `[1, tokens, V]`."""

    def forward(own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        mine = chosen.mine.to(hidden.device)
        return own(hidden.flatten(0, 1).index_select(0, mine)[None])

    stand_in.begin(forward)


def shard_scores(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    shift_labels: Tensor,
    rows: Tensor | None,
    *,
    num_words: int,
    softcap: float | None = None,
    scale: float = 1.0,
    with_top1: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`[B, L]` log-probabilities of a shard's labels, 0 where there is none, and whether each label
    is the likeliest word, if that is wanted.

    Args:
        head: makes logits `[1, tokens, V]`.
        hidden: `[B, L, D]`, what `head` makes them of.
        shift_labels: `[B, L]`
        rows: indices of those of the `B * L` tokens that have a label; None: all.
    """
    labels, given = shift_labels.to(hidden.device).flatten(), hidden.flatten(0, 1)
    size = len(labels)
    if rows is not None:
        rows = rows.to(hidden.device)
        labels, given = labels[rows], given.index_select(0, rows)
    options: dict[str, Any] = {"num_words": num_words, "softcap": softcap, "scale": scale}
    log_probs, is_top1 = label_scores(head, given, labels, **options, with_top1=with_top1)

    def placed(values: Tensor) -> Tensor:
        if rows is not None:
            values = values.new_zeros(size).index_copy(0, rows, values)
        return values.view(hidden.shape[:2])

    return placed(log_probs), placed(is_top1) if with_top1 else None
