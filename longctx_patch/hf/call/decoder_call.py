"""The arguments that a patched decoder gets for a sharded or a stock forward pass."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.data import ROWS_KEY, SHARD_KEY
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.families.checks import UnsupportedModelError, adapter_problem
from longctx_patch.families.rope_facts import reach_problem
from longctx_patch.hf.call.fire_check import FirstStep
from longctx_patch.hf.call.image_rows import Spans, own_tokens, spans_mask
from longctx_patch.hf.call.inputs import (
    check_whole_rows,
    input_problem,
    tokens_of,
    vocabulary_problem,
    wants_router_logits,
)
from longctx_patch.hf.call.mixer_kernels import Countable
from longctx_patch.hf.call.row import MaskFactory, ShardedRow, made_mask
from longctx_patch.hf.call.sharded import LayerKind, ShardedCall, key_of
from longctx_patch.hf.call.stock_documents import check_one_document
from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.hf.model import transformers_api
from longctx_patch.sequence.masks import Mask
from longctx_patch.transport.meeting import Meeting, SequenceParallelismError

Arguments = dict[str, Any]

_TWO_MASKS = (
    "images whose tokens see each other in both directions, with a model that was patched with a "
    "mask: that of the images would be lost. Patch it without mask=."
)


class _Batch(NamedTuple):
    """What this rank has been given for one sharded forward pass."""

    tokens: Tensor
    """`[B, L]` ids, or `[B, L, hidden]` embeddings."""
    row: ShardedRow
    positions: Tensor
    """`[1, L]`: positions of this rank's tokens in their documents, by the layout."""
    routed: bool
    """Whether the pass returns router logits."""
    mask: Mask | None
    problem: str | None
    """Why this rank can't compute with the batch, in words."""


@dataclass(frozen=True, kw_only=True)
class DecoderCalls:
    """Turns each call of a patched decoder into a sharded or a stock forward pass."""

    group: SequenceGroup
    mask: MaskFactory | None
    first_step: FirstStep
    checkpoints: LayerCheckpoints
    is_recurrent: bool = False
    """Whether some layers carry a state along the sequence."""
    countable: Countable | None = None
    """What their kernels can count in transformers' own forward."""
    own_forward_trains: bool = True
    """Whether transformers' own forward of them can train here, without a cache."""
    reach: int | None = None
    """Tokens of the longest document within reach of the model's RoPE; None: any. It is looked up
    once, as the config's facts take 0.1 ms a layer."""
    seen: set[LayerKind] = field(default_factory=set)
    """Kinds of layers that have run."""
    prepared: dict[bytes, ShardedCall] = field(default_factory=dict)
    """Calls whose plans were made ahead, by the rows of their batch."""

    def arguments(self, decoder: nn.Module, args: tuple[Any, ...], given: Arguments) -> Arguments:
        """The decoder's keyword arguments for this pass; collective for a sharded batch.

        Raises ValueError for a batch that can't be used, on every rank of the group.
        """
        kwargs = dict(given)
        if isinstance(mask := kwargs.get("attention_mask"), dict) and not mask:
            del kwargs["attention_mask"]  # it stood in place of masks that the model would make
        if "logits_to_keep" in kwargs:  # the head leaves tokens out, so Gemma 4's layers need not
            kwargs["logits_to_keep"] = 0
        shard, replica = kwargs.pop(SHARD_KEY, None), kwargs.pop(ROWS_KEY, None)
        if shard is None:
            self._begin_stock(decoder, args, kwargs)
            return kwargs | {transformers_api.CALL_KEY: None}
        placed: Arguments = {}
        spans = () if replica is None else replica.image_spans
        only_windows = replica is not None and replica.only_windows_see_ahead
        if replica is not None and replica.has_images:
            held = self._held(ShardedRow.read(shard), kwargs["inputs_embeds"].device)
            kwargs, placed = own_tokens(kwargs, held)
        batch = self._read(decoder, args, kwargs, shard, spans)
        count = kwargs.get("num_valid_tokens") if replica is None else replica.num_items
        begun = self._begin_sharded(decoder, shard, batch, count)
        if (call := begun[transformers_api.CALL_KEY]) is not None:
            call.only_windows_are_masked = only_windows
        return kwargs | begun | placed

    def make_plans(self, shard: Tensor) -> None:
        """Make the plans of a batch that is to come. A batch that can't be used is skipped: its
        forward pass raises the error, on all ranks."""
        row = ShardedRow.read(shard)
        mask, problem = self._mask(row, row.problem)
        if problem is None:
            call = ShardedCall(self.group, row.documents, mask, row.real_lengths, self.seen)
            call.make_plans()
            self.prepared[key_of(shard)] = call

    def _begin_stock(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        check_whole_rows(self.group, kwargs)
        if self.mask is not None:
            raise ValueError(
                "whole rows with a model that was patched with a mask: the stock path would attend "
                "causally. Pass sharded batches (SequenceShardCollator; in evaluation too), or "
                "handle.unpatch() to generate."
            )
        if self.is_recurrent:
            check_one_document(kwargs)
            self._check_countable(tokens_of(args, kwargs))
        if not decoder.training:
            return
        if self.group.num_ranks > 1:
            # AdaLoRA calls the model's forward without the model's hooks.
            raise ValueError(
                adapter_problem(self.first_step.model)
                or f"this model is patched for {self.group.num_ranks} ranks per sequence, but its "
                "decoder was called in training without the model, or with a cache. Call the "
                "model on whole rows or on a shard; model.eval() first to generate; or "
                "handle.unpatch()."
            )
        if not self.own_forward_trains and kwargs.get("use_cache") is False:
            raise ValueError(
                "transformers' own forward of these recurrent layers can't train without a cache: "
                "mamba-ssm's kernel for their convolution and scan needs causal-conv1d, which it "
                "could not import. pip install causal-conv1d (built for the installed torch), or "
                "train on rows of token ids with labels, alone."
            )
        if group := self.group.config.shifted_group:
            raise ValueError(
                f"shifted_group={group}: this pass in training mode is not one of whole rows of "
                "tokens, so that every head would attend fully. Call the model on rows of token "
                "ids, with attention_mask or position_ids alone; model.eval() first to generate."
            )
        tokens = tokens_of(args, kwargs)
        self._check_reach(decoder, tokens.shape[1], kwargs.get("position_ids"))
        self.checkpoints.begin(decoder, self.checkpoints.propose(decoder, tokens, tokens.shape[1]))

    def _beyond_reach(self, decoder: nn.Module, num_tokens: int) -> str | None:
        """Why documents of so many tokens are too long for the model's RoPE."""
        is_within = self.reach is None or num_tokens <= self.reach
        if is_within or self.group.config.allow_beyond_reach:
            return None
        return reach_problem(decoder.config, num_tokens)

    def _check_reach(self, decoder: nn.Module, length: int, positions: Tensor | None) -> None:
        """The same of rows on the stock path; positions, where given, tell their documents."""
        problem = self._beyond_reach(decoder, length)
        if problem is not None and positions is not None:
            problem = self._beyond_reach(decoder, int(positions.max()) + 1)
        if problem is not None:
            raise ValueError(problem)

    def _uncountable(self, tokens: Tensor) -> str | None:
        """Why transformers' own forward can't compute with `[B, L]` or `[B, L, hidden]`."""
        if self.countable is None:
            return None
        return self.countable.problem(tokens.shape[0] * tokens.shape[1])

    def _check_countable(self, tokens: Tensor) -> None:
        if (problem := self._uncountable(tokens)) is not None:
            raise ValueError(
                f"{problem}. In evaluation call the model with labels within "
                "handle.sharing_evaluation(), which cuts up what they can't count; generate from "
                "fewer tokens at a time."
            )

    def _read(
        self,
        decoder: nn.Module,
        args: tuple[Any, ...],
        kwargs: Arguments,
        shard: Tensor,
        spans: Spans,
    ) -> _Batch:
        tokens, row = tokens_of(args, kwargs), ShardedRow.read(shard).placed(self.group)
        held = self._held(row, tokens.device)
        positions, routed = (
            row.documents.positions(held)[None],
            wants_router_logits(decoder, kwargs),
        )
        problem = (
            row.problem
            or vocabulary_problem(decoder, 0, row.most_id)
            or self._beyond_reach(decoder, row.longest)
            or input_problem(kwargs, positions, routed)
        )
        return _Batch(tokens, row, positions, routed, *self._mask(row, problem, spans))

    def _held(self, row: ShardedRow, device: torch.device) -> Tensor:
        """Places in the row of this rank's tokens."""
        return self.group.layout(row.documents).positions(self.group.group_rank, device)

    def _mask(
        self, row: ShardedRow, problem: str | None, spans: Spans = ()
    ) -> tuple[Mask | None, str | None]:
        """(mask, problem), the user's mask made only for a row without a problem; `spans` are
        those of images whose tokens see each other."""
        if spans and self.mask is not None:
            return None, problem or _TWO_MASKS
        if spans and problem is None:
            return spans_mask(row.documents.num_tokens, spans), None
        if self.mask is None or problem is not None:
            return None, problem
        return made_mask(self.mask, row)

    def _begin_sharded(
        self, decoder: nn.Module, shard: Tensor, batch: _Batch, count: Any
    ) -> Arguments:
        """Further arguments of the decoder, once all ranks have agreed to compute."""
        documents = batch.row.documents
        rows = self.group.require_shards(
            Meeting.BATCH,
            documents,
            batch.tokens.shape[1],
            self._agreed_state(decoder, batch, count),
            (self.checkpoints.propose(decoder, batch.tokens, documents.num_tokens),),
            problem=self._problem(decoder, batch),
            whole="the same batch",
            fix="Feed every rank of the group the same rows: the same data (call set_seed before "
            "you make some at random), the same sampler and seed, dispatch_batches=False.",
        )
        if not min(self.group.layout(documents).sizes):
            raise ValueError(
                f"{documents.num_tokens} tokens over {self.group.num_ranks} ranks leaves a rank "
                "without tokens, which a model can't compute. Pad the rows; "
                "SequenceShardCollator does."
            )
        self.checkpoints.begin(decoder, min(whole_layers for (whole_layers,) in rows))
        is_plain = (
            documents.is_one
            and batch.mask is None
            and not (self.group.config.shifted_group and decoder.training)
            and not batch.routed
            and self._uncountable(batch.tokens) is None
            and (self.own_forward_trains or not decoder.training)
        )
        if self.group.num_ranks == 1 and is_plain and not self.checkpoints.replays_attention:
            return {transformers_api.CALL_KEY: None}
        call = self.prepared.pop(key_of(shard), None)
        if call is None or call.mask != batch.mask:
            call = ShardedCall(self.group, documents, batch.mask, batch.row.real_lengths, self.seen)
        call.fire_check, call.positions = self.first_step.begin(decoder), batch.positions[0]
        num_rows = batch.tokens.shape[0]
        return {
            "attention_mask": transformers_api.no_mask(call, num_rows, batch.tokens.device),
            "position_ids": batch.positions.expand(num_rows, -1),
            "use_cache": False,
            transformers_api.CALL_KEY: call,
        }

    def _problem(
        self, decoder: nn.Module, batch: _Batch
    ) -> ValueError | SequenceParallelismError | None:
        """What is wrong on this rank, with attention in earlier passes, with adapters that came
        after `patch`, or with its batch."""
        misfire = self.first_step.misfire(decoder)
        if misfire is not None:
            return SequenceParallelismError(misfire)
        if (adapter := adapter_problem(self.first_step.model)) is not None:
            return UnsupportedModelError(adapter)
        return None if batch.problem is None else ValueError(batch.problem)

    def _agreed_state(self, decoder: nn.Module, batch: _Batch, count: Any) -> str:
        """What must be the same on all ranks before a forward pass, in words."""
        mask = 0 if batch.mask is None else batch.mask.checksum
        counted = count is not None and not batch.problem
        return (
            f"{batch.tokens.shape[0]} rows, checksum {batch.row.checksum:08x}, "
            f"{'training' if decoder.training else 'evaluating'}, "
            f"gradients {'on' if torch.is_grad_enabled() else 'off'}, mask {mask:08x}, "
            f"router logits {'on' if batch.routed else 'off'}, "
            f"first step {'now' if self.first_step.is_due(decoder) else 'done or not training'}"
            f"{f', {float(count)!r} tokens in the step' if counted else ''}"
        )
