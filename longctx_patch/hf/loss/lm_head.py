"""The loss of a sharded pass inside the model's head, so that full logits are never made.

A causal LM's forward runs `logits = self.lm_head(hidden)`, perhaps a softcap or a scale, then
`self.loss_function(logits, labels, ...)`. Under FSDP2 the head's whole weight exists only while
the head itself runs, so that is where the loss is computed: in a sharded pass with labels, the head
of a patched model returns the sum of the token losses in place of logits. What the forward then
does to the sum has no effect, since the loss has applied it already (`LogitsRule`), and ShardLoss
turns the sum into this rank's loss. Every other pass runs the stock head.

Where PEFT trains the head as a whole (`modules_to_save`), its copy is the head. A head that is not
a plain `nn.Linear`, has a forward hook, or is no longer the module that was bound (PEFT wraps it to
train it by LoRA), runs as it is: the loss then comes from full logits, and is as exact. Under
`loss="chunked"` these logits are still dropped from the outputs.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.data.whole_rows import RowsPass
from longctx_patch.families.facts import text_config
from longctx_patch.families.family import LogitsRule
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.call.decoder_call import ShardedPass
from longctx_patch.hf.call.gather import chosen_tokens
from longctx_patch.hf.loss.shard_loss import LossPass, ShardLoss
from longctx_patch.hf.loss.token_head import (
    StandIn,
    TokenFields,
    begin_chosen,
)
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.loss.linear_cross_entropy import linear_cross_entropy, linear_scores


class LossPasses:
    """Opens the loss of a model around each sharded pass with labels, so that its head computes it.

    In a pass of whole rows that wants something else than a loss, the head computes that.
    """

    def __init__(self, model: PreTrainedModel, loss: ShardLoss) -> None:
        self.loss = loss
        self._model, self._stand_in = model, StandIn(model)
        self._keeps_logits = loss.group.config.loss == "logits"
        """Whether a pass with labels returns its logits."""

    def end(self) -> LossPass | None:
        """Close what is open, perhaps of an interrupted pass."""
        current = self.loss.current
        self.loss.close()
        self._stand_in.end()
        return current

    def open(self, found: ShardedPass) -> None:
        """Begin a pass that all ranks have accepted."""
        rows = found.rows
        wanted = "loss" if rows is None else rows.wanted
        of_labels = wanted in ("log_probs", "top1")
        self.loss.current = current = _with_labels(found)
        if current is not None and (of_labels or not self._keeps_logits):
            current.look_up()
        if current is not None and rows is not None and wanted == "scores":
            current.wants, current.how = wanted, rows.scores
        if current is not None and of_labels:
            current.wants, current.with_top1 = "log_probs", wanted == "top1"
            _begin_log_probs(self._stand_in, current, self._model, self.loss.num_words)
        if rows is not None and rows.columns is not None:
            group = self.loss.group
            chosen = chosen_tokens(rows, group.layout(found.row.documents))
            begin_chosen(self._stand_in, chosen[group.group_rank])

    def close(self, rows: RowsPass | None, outputs: Any) -> Any:
        """Returns the model's answer in place of its outputs; None if its forward has failed."""
        current = self.end()
        if current is None or outputs is None:
            return outputs
        if rows is not None and rows.wanted == "fused":  # TRL's own forward, over the shard
            return outputs
        if current.logits is None:
            raise RuntimeError(_LOSS_WAS_REPLACED)
        if current.wants == "log_probs":
            return TokenFields(log_probs=current.log_probs, is_top1=current.is_top1)
        if current.scores is not None:
            current.scores.aux_loss = outputs.get("aux_loss")
            return current.scores
        return outputs if self._keeps_logits else _without(current.logits, outputs)


def _with_labels(found: ShardedPass) -> LossPass | None:
    if found.num_labels is None or found.shift_labels is None:
        return None
    return LossPass(found.shift_labels, found.num_labels, found.group_labels)


_LOSS_WAS_REPLACED = (
    "the model made a loss of a shard by itself, which is not that of the whole row: its forward "
    "or its loss_function was replaced, as Liger Kernel's fused loss and TRL's fused head do. "
    "Leave them as they were (Liger: fused_linear_cross_entropy=False), or give TRL's fused head "
    "whole rows, which the model cuts itself; the loss of a patched model is in chunks already."
)


def _begin_log_probs(
    stand_in: StandIn, current: LossPass, model: PreTrainedModel, num_words: int
) -> None:
    """Let the head compute log-probabilities, unless a hook wants to see all logits."""
    if _has_hooks_on_logits(model):
        return
    rule = FAMILIES[model.config.model_type].logits
    softcap, scale = _softcap_and_scale(rule, model)
    current.sum_is_handed_on = rule is None

    def forward(own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return current.compute_log_probs(
            own, hidden, num_words=num_words, softcap=softcap, scale=scale
        )

    stand_in.begin(forward)


def bind_head(model: PreTrainedModel, loss: ShardLoss) -> Callable[[], None]:
    """Let the head compute the loss of passes that are open; return a function that undoes it.

    The instance gets its own forward, as a method. A copy of the module gets a copy of the method,
    which sees whether its module is the head now.
    """
    rule = FAMILIES[model.config.model_type].logits

    def forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        current = loss.current
        if current is None or current.wants == "log_probs":
            return type(self).forward(self, hidden)
        if self is not running_head(model) or _has_hooks_on_logits(model):
            return type(self).forward(self, hidden)
        softcap, scale = _softcap_and_scale(rule, model)
        current.sum_is_handed_on = rule is None
        if current.wants == "scores":
            current.scores = _scores(self, hidden, current, softcap, scale)
            current.log_probs = log_probs = current.scores["log_probs"]
            return log_probs
        current.token_sum = _token_sum(self, hidden, current, softcap, scale)
        return current.token_sum

    heads = [head for head in _possible_heads(model) if _can_be_bound(head)]
    for head in heads:
        vars(head)["forward"] = MethodType(forward, head)

    def restore() -> None:
        for head in heads:
            if getattr(vars(head).get("forward"), "__func__", None) is forward:
                del vars(head)["forward"]

    return restore


def _can_be_bound(head: nn.Module) -> bool:
    own = vars(head).get("forward")  # PEFT may have copied our own
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    return is_linear and (own is None or own.__module__ == __name__)


def running_head(model: PreTrainedModel) -> nn.Module:
    """The module that runs as the head now: PEFT's copy where an active adapter trains it."""
    head = model.get_output_embeddings()
    if not isinstance(copies := getattr(head, "modules_to_save", None), nn.ModuleDict):
        return head
    active = () if head.disable_adapters else head.active_adapters
    return copies[active[0]] if active else head.original_module


def _possible_heads(model: PreTrainedModel) -> list[nn.Module]:
    """The head, or its original and the copies that adapters of PEFT train."""
    head = model.get_output_embeddings()
    if not isinstance(copies := getattr(head, "modules_to_save", None), nn.ModuleDict):
        return [head]
    return [head.original_module, *copies.values()]


def _has_hooks_on_logits(model: PreTrainedModel) -> bool:
    """Says whether a hook may change what the head returns; FSDP's hooks change no value."""
    heads = {model.get_output_embeddings(), running_head(model)}
    hooks = (getattr(h, "func", h) for head in heads for h in head._forward_hooks.values())
    return any(not str(hook.__module__).startswith("torch.distributed.") for hook in hooks)


def computes_scores(model: PreTrainedModel) -> bool:
    """Says whether the head is bound, so that it computes losses of a pass itself."""
    head = running_head(model)
    own = vars(head).get("forward")
    is_bound = isinstance(own, MethodType) and own.__module__ == __name__ and own.__self__ is head
    return is_bound and not _has_hooks_on_logits(model)


def _token_sum(
    head: nn.Linear, hidden: Tensor, current: LossPass, softcap: float | None, scale: float
) -> Tensor:
    """The sum of losses of tokens that have a label."""
    hidden, labels = current.labelled(hidden)
    return linear_cross_entropy(
        hidden, head.weight, labels, bias=head.bias, softcap=softcap, scale=scale
    )


def _scores(
    head: nn.Linear, hidden: Tensor, current: LossPass, softcap: float | None, scale: float
) -> TokenFields:
    """Returns what is known of each label."""
    segments = _labelled_by_row(current) if current.how.by_row else None
    hidden, labels = current.labelled(hidden)
    losses, entropy, is_top1, mean_logits = linear_scores(
        hidden,
        head.weight,
        labels,
        bias=head.bias,
        softcap=softcap,
        scale=scale,
        segments=segments,
        with_mean_logits=current.how.with_mean_logits,
    )
    found: dict[str, Tensor] = {"log_probs": -losses, "entropy": entropy, "is_top1": is_top1}
    if current.how.with_mean_logits:
        found["mean_logits"] = mean_logits
    mask = current.shift_labels.to(hidden.device) != IGNORE_INDEX
    placed = {name: current.placed(values) for name, values in found.items()}
    return TokenFields(label_mask=mask, **placed)


def _labelled_by_row(current: LossPass) -> list[int]:
    """Counts how many tokens of each row have a label; the host waits for the device."""
    num_rows, length = current.shift_labels.shape
    if current.rows is None:
        return [length] * num_rows
    counts: list[int] = (current.shift_labels != IGNORE_INDEX).sum(1).tolist()
    return counts


def _softcap_and_scale(
    rule: LogitsRule | None, model: PreTrainedModel
) -> tuple[float | None, float]:
    if rule is None:
        return None, 1.0
    holder = text_config(model.config) if rule.holder == "config" else model
    number = getattr(holder, rule.attribute)
    if rule.operation == "softcap":
        return number, 1.0
    return None, number if rule.operation == "multiply" else 1 / number


def _without(logits: Any, outputs: Any) -> Any:
    """A model's outputs less its logits, as a tuple or as what transformers returns."""
    if isinstance(outputs, tuple):
        return tuple(value for value in outputs if value is not logits)
    assert isinstance(outputs, Mapping)
    kept = {name: value for name, value in outputs.items() if name != "logits"}
    return type(outputs)(**kept)
