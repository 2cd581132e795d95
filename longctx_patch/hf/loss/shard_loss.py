"""The loss of a patched model: the loss law for shards, the stock loss for everything else."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longctx_patch.data import SHARD_KEY
from longctx_patch.data.whole_rows import HeadScores, RowsPass
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.families.facts import text_config
from longctx_patch.hf.call.inputs import short
from longctx_patch.hf.layers.checkpointing import GRADIENTS_IN_EVALUATION
from longctx_patch.hf.loss.token_head import TokenFields
from longctx_patch.hf.model.transformers_api import router_weight
from longctx_patch.loss.law import IGNORE_INDEX, replica_scale, scale_of, sum_of_token_losses
from longctx_patch.loss.token_log_probs import label_scores
from longctx_patch.transport import VirtualTransport
from longctx_patch.transport.meeting import Meeting, meet, tried


@dataclass
class LossPass:
    """A forward pass over a shard with labels, which all ranks of the group have accepted."""

    shift_labels: Tensor
    """`[B, L]`"""
    num_labels: int
    """Tokens of this rank that have a loss."""
    group_labels: int
    """Tokens of all ranks of the group that have a loss."""
    rows: Tensor | None = None
    """Indices of those of the `B * L` tokens that have a loss, to drop the others. None if they
    were not looked up, or if all tokens have one."""
    segments: list[int] | None = None
    """How many of `rows` in turn have log-probabilities with one gradient, where rows of the batch
    share tokens."""
    repeats: bool = False
    """Whether `rows` has a token once for each row of the batch that has its label."""
    token_sum: Tensor | None = None
    """The sum of this rank's token losses, once the head has computed it."""
    sum_is_handed_on: bool = False
    """Whether the model's forward passes what the head returns to the loss unchanged."""
    wants: Literal["loss", "log_probs", "scores"] = "loss"
    """Whether each label's log-probability is wanted, or more of it, instead of the loss."""
    how: HeadScores = field(default_factory=HeadScores)
    """How the head makes scores."""
    with_top1: bool = False
    """Whether log-probabilities come with whether each label is the likeliest word."""
    log_probs: Tensor | None = None
    """`[B, L]`, once they are computed: by the head, or of logits."""
    is_top1: Tensor | None = None
    """`[B, L]`, with the log-probabilities."""
    scores: TokenFields | None = None
    """Once the head has computed them."""
    logits: Any = None
    """What the model's forward uses as logits, and returns."""

    def labelled(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and labels of tokens that have a label: products leave out the others."""
        if hidden.shape[:-1] != self.shift_labels.shape:
            raise ValueError(
                f"labels {list(self.shift_labels.shape)} for hidden states of "
                f"{list(hidden.shape[:-1])} tokens: each token of the shard has one label. Pass "
                "the batch of SequenceShardCollator unchanged."
            )
        hidden, labels = hidden.flatten(0, -2), self.shift_labels.to(hidden.device).flatten()
        if self.rows is None:
            return hidden, labels
        rows = self.rows.to(hidden.device)
        return hidden.index_select(0, rows), labels[rows]

    def look_up(self) -> None:
        """Look up which tokens have a loss, where the host has waited for the device anyway."""
        if self.rows is None and self.num_labels < self.shift_labels.numel():
            self.rows = (self.shift_labels != IGNORE_INDEX).flatten().nonzero()[:, 0]

    def placed(self, values: Tensor) -> Tensor:
        """`[B, L]` of what these tokens have, 0 for the others."""
        if self.rows is not None:
            rows = self.rows.to(values.device)
            values = values.new_zeros(self.shift_labels.numel()).index_copy(0, rows, values)
        return values.view(self.shift_labels.shape)

    def compute_log_probs(
        self,
        head: Callable[[Tensor], Tensor],
        hidden: Tensor,
        *,
        num_words: int,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """`[B, L]` log-probabilities of the labels, by `head`, which makes logits `[1, tokens, V]`
        of hidden states `[B, L, D]`."""
        given, labels = self.labelled(hidden)
        options: dict[str, Any] = {"num_words": num_words, "softcap": softcap, "scale": scale}
        log_probs, is_top1 = label_scores(head, given, labels, **options, with_top1=self.with_top1)
        self.log_probs = self.placed(log_probs)
        self.is_top1 = self.placed(is_top1) if self.with_top1 else None
        return self.log_probs


class ShardLoss:
    """Computes losses: transformers calls it as `model.loss_function`.

    A mixture of experts adds a weight (`router_aux_loss_coef`) times its router's loss afterwards.
    The weight is scaled by the batch's share of the step's tokens, so that the router losses of a
    step sum to their mean weighted by tokens.
    """

    def __init__(self, model: PreTrainedModel, group: SequenceGroup) -> None:
        self.has_router_loss = False
        """Whether the pass under way returns router logits."""
        self.current: LossPass | None = None
        """The pass under way, until `close`."""
        self._model = model
        self._group = group
        self._stock = model.loss_function
        self._weight = router_weight(model)
        self._coefficient: float | None = None
        """The model's own coefficient, while the pass under way has a scaled one."""

    def close(self) -> None:
        self.current = None
        if self._coefficient is not None:
            setattr(self._model, self._weight, self._coefficient)
            self._coefficient = None

    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        if (found := kwargs.pop(SHARD_KEY, None)) is not None:
            return self._of_shard(logits, labels, replica=getattr(found, "rows", None), **kwargs)
        loss: Tensor = self._stock(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return loss

    def _of_shard(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        replica: RowsPass | None,
        shift_labels: Tensor | None = None,
        num_valid_tokens: int | Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss law; options that would change a stock loss were refused with the decoder's
        inputs. `num_valid_tokens` counts the whole step over all processes."""
        current = self.current or self._past_hooks(labels, shift_labels)
        current.logits = logits
        if current.wants != "loss":
            return _sum_of_log_probs(current, logits)
        counts = {"group_labels": current.group_labels, "group_ranks": self._group.num_ranks}
        if replica is not None:  # the router's loss is added whole, as to one process's loss
            scale = replica_scale(replica.num_items, **counts, training=self.is_training)
        else:
            self._check_virtual_ranks()
            self._check_accumulation()
            scale = scale_of(
                current.shift_labels.to(logits.device),
                **counts,
                num_valid_tokens=num_valid_tokens,
                training=self.is_training,
            )
            if self.has_router_loss:
                self._count_router_loss(scale.router_share(**counts))
        if current.token_sum is None:
            given = current.labelled(logits) if current.repeats else (logits, current.shift_labels)
            return scale.loss(sum_of_token_losses(*given))
        if current.sum_is_handed_on:
            _check_logits_unchanged(current.token_sum, logits)
        return scale.loss(current.token_sum)

    def num_labels(self, given: Mapping[str, Any], tokens: torch.Size | None = None) -> int | None:
        """This rank's tokens that have a loss, in a sharded pass with these arguments; None where
        it has no labels.

        `tokens`: the shape `[B, L]` of what the labels are for, where it is known.

        Raises ValueError for impossible labels, and for a loss that can't have gradients.
        """
        labels: Any = given.get("labels")
        shift_labels: Any = given.get("shift_labels")
        # In training, shift_labels without labels are a mistake.
        if labels is None and (shift_labels is None or not self.is_training):
            return None
        problem = self._replaced()
        kept = given.get("logits_to_keep", 0)
        if problem is None and (not isinstance(kept, int) or kept):
            problem = (
                f"logits_to_keep={short(kept)} with labels of a sharded batch: the loss is over "
                "all tokens of the shard. Leave it out, or leave out labels."
            )
        if not self.is_training and would_have_gradients(self._model):
            problem = problem or GRADIENTS_IN_EVALUATION
        if problem is not None:
            raise ValueError(problem)
        _check_shapes(labels, shift_labels, tokens)
        return _count_labels(labels, shift_labels, self.num_words)

    def _past_hooks(self, labels: Any, shift_labels: Any) -> LossPass:
        """The pass where the model's forward was called without its hooks. Collective: the ranks
        have not counted labels yet."""
        everyone, given = self._group.everyone, {"labels": labels, "shift_labels": shift_labels}
        mine = tried(everyone, Meeting.LABELS, lambda: self.num_labels(given)) or 0
        told = meet(everyone, Meeting.LABELS, (mine,))
        return LossPass(shift_labels, mine, sum(count for (count,) in told))

    def _replaced(self) -> str | None:
        """Says what is wrong with a loss function that the model got after `patch`."""
        if (found := self._model.loss_function) is self:
            return None
        return (
            f"the model's loss_function is {found!r} now, which knows nothing of shards. Leave it "
            "as patch set it, and compute a loss of your own from handle.token_log_probs(batch) or "
            "from logits (LongContextConfig(loss='logits'))."
        )

    def _check_virtual_ranks(self) -> None:
        """Refuse a shard where ranks are threads: its loss is scaled by the processes."""
        if isinstance(self._group.everyone, VirtualTransport):
            raise ValueError(
                "labels in a batch of SequenceShardCollator on virtual ranks: its loss counts the "
                "processes of torch.distributed, and virtual ranks are threads of one. Give the "
                "model whole rows."
            )

    def _check_accumulation(self) -> None:
        """Refuse a shard where `accelerator.backward` would divide its loss: it is a share of all
        tokens of the step already."""
        accelerate = sys.modules.get("accelerate.state")  # nobody divides where it isn't loaded
        state = {} if accelerate is None else accelerate.GradientState._shared_state
        steps = state.get("plugin_kwargs", {}).get("num_steps", 1)
        if self.is_training and steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps={steps} with a batch of SequenceShardCollator: "
                "accelerator.backward would divide its loss, which is a share of all tokens of the "
                "step. Leave it at 1 and pass num_valid_tokens=count_valid_tokens(batches) to each "
                "forward, or give the model whole rows."
            )

    @property
    def is_training(self) -> bool:
        return self._model.training

    @property
    def group(self) -> SequenceGroup:
        return self._group

    @property
    def num_words(self) -> int:
        """Size of the head's vocabulary."""
        head = self._model.get_output_embeddings()
        # PEFT makes a copy of a tied head with its two numbers of features exchanged.
        head = getattr(head, "original_module", head)
        # Each forward asks, so the config's facts, which cost 0.1 ms a layer, are not made for it.
        return getattr(head, "out_features", text_config(self._model.config).vocab_size)

    def _count_router_loss(self, share: float) -> None:
        """Scale the router's coefficient until the pass is closed. It is read anew in each pass,
        since users may change it."""
        if self._coefficient is None:
            self._coefficient = float(getattr(self._model, self._weight))
        setattr(self._model, self._weight, self._coefficient * share)


def _sum_of_log_probs(current: LossPass, logits: Tensor) -> Tensor:
    """Something for the model's forward to return as a loss, once each label has its own."""
    if current.log_probs is None:
        return current.compute_log_probs(
            lambda tile: tile, logits, num_words=logits.shape[-1]
        ).sum()
    if current.sum_is_handed_on:
        _check_logits_unchanged(current.log_probs, logits)
    return current.log_probs.sum()


def would_have_gradients(model: PreTrainedModel) -> bool:
    """Says whether a loss of the model could go backward."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())


def _check_logits_unchanged(made: Tensor, logits: Tensor) -> None:
    """Refuse logits that the model changes in a way that the table doesn't know.

    FSDP's `output_dtype` may have cast what the head returned, which changes no loss.
    """
    if logits is not made and logits.dtype == made.dtype:
        raise RuntimeError(
            "something changes the logits between the model's head and its loss, which the loss "
            "inside the head can't take into account. Use LongContextConfig(loss='logits')."
        )


_LABELS_DIFFER = (
    "labels differ from shift_labels: the loss reads shift_labels, so a change of labels alone "
    "would do nothing. Mask labels in the rows, before the collator shifts them."
)


def _check_shapes(labels: Any, shift_labels: Any, tokens: torch.Size | None) -> None:
    if not isinstance(labels, Tensor) or not isinstance(shift_labels, Tensor):
        raise ValueError(
            f"this batch is a shard with labels {short(labels)} and shift_labels "
            f"{short(shift_labels)}: both are tensors, shifted over the whole sequence before it "
            "is cut. Pass the batch of SequenceShardCollator unchanged, or without both."
        )
    if labels.shape != shift_labels.shape:
        raise ValueError(_LABELS_DIFFER)
    if tokens is not None and labels.shape != tokens:
        raise ValueError(
            f"labels {list(labels.shape)} for tokens {list(tokens)}: each token of the shard has "
            "one label. Pass the batch of SequenceShardCollator unchanged."
        )


def _count_labels(labels: Tensor, shift_labels: Tensor, num_words: int) -> int:
    """The number of tokens that have a loss. Raises ValueError for labels that are no words."""
    counts = shift_labels != IGNORE_INDEX
    is_wrong = counts & ((shift_labels < 0) | (shift_labels >= num_words))
    facts = torch.stack([counts.sum(), is_wrong.sum(), (labels != shift_labels).sum()])
    num_labels, num_wrong, num_differ = facts.tolist()  # waits for the device once
    if num_differ:
        raise ValueError(_LABELS_DIFFER)
    if num_wrong:
        raise ValueError(
            f"label {int(shift_labels[is_wrong][0])}: labels are from 0 to {num_words - 1}, or "
            f"{IGNORE_INDEX} for tokens without loss. Check the tokenizer against the model's "
            "vocab_size."
        )
    return num_labels
