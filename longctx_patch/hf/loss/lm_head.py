"""The loss of a sharded pass inside the model's head, so that full logits are never made.

A causal LM's forward runs `logits = self.lm_head(hidden)`, perhaps a softcap or a scale, then
`self.loss_function(logits, labels, ...)`. Under FSDP2 the head's whole weight exists only while
the head itself runs, so that is where the loss is computed: in a sharded pass with labels, the head
of a patched model returns the sum of the token losses in place of logits. What the forward then
does to the sum has no effect, since the loss has applied it already (`LogitsRule`), and ShardLoss
turns the sum into this rank's loss. Every other pass runs the stock head.

Where PEFT trains the head as a whole (`modules_to_save`), its copy is the head. A head that is not
a plain `nn.Linear`, has a forward hook, or is wrapped by PEFT to train it by LoRA, runs as it is:
the loss then comes from full logits, and is as exact. Under `loss="chunked"` these logits are still
dropped from the outputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.data.whole_rows import RowsPass, SharedTokens
from longctx_patch.families.facts import text_config
from longctx_patch.families.family import LogitsRule
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.call.decoder_call import ShardedPass
from longctx_patch.hf.call.gather import ChosenTokens, chosen_tokens
from longctx_patch.hf.loss.shard_loss import LossPass, ShardLoss
from longctx_patch.hf.loss.token_head import TokenFields
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.loss.linear_cross_entropy import linear_cross_entropy, linear_scores
from longctx_patch.sequence.documents import Documents


class LossPasses:
    """Opens the loss of a model around each sharded pass with labels, so that its head computes it.

    In a pass of whole rows that wants something else than a loss, the head computes that.
    """

    def __init__(self, model: PreTrainedModel, loss: ShardLoss) -> None:
        self.loss = loss
        self._model = model
        self._give_back: Callable[[], object] = lambda: None
        self._keeps_logits = loss.group.config.loss == "logits"
        """Whether a pass with labels returns its logits."""

    def end(self) -> LossPass | None:
        """Close what is open, perhaps of an interrupted pass."""
        current = self.loss.current
        self.loss.close()
        self._give_back()
        self._give_back = lambda: None
        return current

    def _run_as(
        self, head: nn.Module, forward: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    ) -> None:
        """Run the head as `forward(own, hidden)` in this pass, where `own` is its own forward."""
        own, before = head.forward, {k: v for k, v in vars(head).items() if k == "forward"}
        vars(head)["forward"] = MethodType(lambda _, hidden: forward(own, hidden), head)
        self._give_back = lambda: (vars(head).pop("forward"), vars(head).update(before))

    def open(self, found: ShardedPass) -> None:
        """Begin a pass that all ranks have accepted."""
        rows = found.rows
        if rows is not None and rows.columns is not None:
            group = self.loss.group
            chosen = chosen_tokens(rows, group.layout(found.row.documents))[group.group_rank]
            self._run_as(self._model.get_output_embeddings(), partial(_chosen_logits, chosen))
        if found.num_labels is None or found.shift_labels is None:
            return
        current = LossPass(found.shift_labels, found.num_labels, found.group_labels)
        self.loss.current = current
        if rows is not None and rows.shared is not None:
            self._share(current, rows, rows.shared, found.row.documents)
        if rows is not None and rows.wanted in ("log_probs", "top1"):
            current.wants, current.with_top1 = "log_probs", rows.wanted == "top1"
            current.look_up()
            if not _has_hooks_on_logits(self._model):
                self._run_as(self._model.get_output_embeddings(), self._log_probs)
        elif not self._keeps_logits:
            if rows is not None and rows.wanted == "scores":
                current.wants, current.how = "scores", rows.scores
            current.look_up()
            if (head := plain_head(self._model)) is not None:
                self._run_as(head, self._loss_of)

    def _share(
        self, current: LossPass, rows: RowsPass, shared: SharedTokens, documents: Documents
    ) -> None:
        """Let labels of shared tokens count as in rows apart."""
        layout = self.loss.group.layout(documents)
        place = layout.positions(self.loss.group.group_rank), layout.num_tokens
        current.group_labels = int(shared.has_label.sum())
        if rows.wanted == "loss":
            current.rows, current.repeats = shared.counted(*place), True
        elif rows.wanted == "scores":
            by_row = rows.scores.by_row
            current.rows, current.segments = shared.alike(*place, by_row=by_row)

    def _log_probs(self, own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        current, (softcap, scale) = self._current()
        return current.compute_log_probs(
            own, hidden, num_words=self.loss.num_words, softcap=softcap, scale=scale
        )

    def _loss_of(self, _: object, hidden: Tensor) -> Tensor:
        """Returns what the plain head makes in place of logits."""
        head: Any = running_head(self._model)
        current, (softcap, scale) = self._current()
        if current.wants == "scores":
            current.scores = _scores(head, hidden, current, softcap, scale)
            current.log_probs = log_probs = current.scores["log_probs"]
            return log_probs
        current.token_sum = _token_sum(head, hidden, current, softcap, scale)
        return current.token_sum

    def _current(self) -> tuple[LossPass, tuple[float | None, float]]:
        """Returns the pass under way, and what the model does to its logits."""
        current = self.loss.current
        assert current is not None
        rule = FAMILIES[self._model.config.model_type].logits
        current.sum_is_handed_on = rule is None
        return current, _softcap_and_scale(rule, self._model)

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


_LOSS_WAS_REPLACED = (
    "the model made a loss of a shard by itself, which is not that of the whole row: its forward "
    "or its loss_function was replaced, as Liger Kernel's fused loss and TRL's fused head do. "
    "Leave them as they were (Liger: fused_linear_cross_entropy=False), or give TRL's fused head "
    "whole rows, which the model cuts itself; the loss of a patched model is in chunks already."
)


def _chosen_logits(chosen: ChosenTokens, own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Makes the logits of a rank's chosen tokens alone, `[1, tokens, V]`."""
    return own(hidden.flatten(0, 1).index_select(0, chosen.mine.to(hidden.device))[None])


def running_head(model: PreTrainedModel) -> nn.Module:
    """The module that runs as the head now: PEFT's copy where an active adapter trains it."""
    head = model.get_output_embeddings()
    if not isinstance(copies := getattr(head, "modules_to_save", None), nn.ModuleDict):
        return head
    active = () if head.disable_adapters else head.active_adapters
    return copies[active[0]] if active else head.original_module


def _has_hooks_on_logits(model: PreTrainedModel) -> bool:
    """Says whether a hook may change what the head returns; FSDP's hooks change no value."""
    heads = {model.get_output_embeddings(), running_head(model)}
    hooks = (getattr(h, "func", h) for head in heads for h in head._forward_hooks.values())
    return any(not str(hook.__module__).startswith("torch.distributed.") for hook in hooks)


def plain_head(model: PreTrainedModel) -> nn.Module | None:
    """Returns the head where all that it does is to multiply by its weight, and nothing asks for
    its logits; else None."""
    head = running_head(model)
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    is_plain = is_plain and "forward" not in vars(head) and not _has_hooks_on_logits(model)
    return head if is_plain else None


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
    segments = current.segments
    if segments is None and current.how.by_row:
        segments = _labelled_by_row(current)
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
