"""Lets ranks agree to compute a shard, and gives a patched decoder its inputs then, or as stock.

A forward pass has one meeting of the ranks, before anything of it is computed: each brings what it
was given and what is wrong with it, and all go on or all raise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.data import SHARD_KEY
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.data.whole_rows import RowsPass
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.families.checks import UnsupportedModelError, adapter_problem
from longctx_patch.families.rope_facts import reach_problem
from longctx_patch.hf.call.fire_check import FirstStep
from longctx_patch.hf.call.image_rows import Spans, own_tokens, spans_mask
from longctx_patch.hf.call.inputs import (
    check_whole_rows,
    input_problem,
    option_problem,
    tokens_of,
    vocabulary_problem,
    wants_router_logits,
)
from longctx_patch.hf.call.mixer_kernels import Countable
from longctx_patch.hf.call.row import MaskFactory, check_place, made_mask
from longctx_patch.hf.call.sharded import LayerKind, ShardedCall
from longctx_patch.hf.call.stock_documents import check_one_document
from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.hf.model import transformers_api
from longctx_patch.sequence.masks import Mask
from longctx_patch.transport.meeting import Meeting, SequenceParallelismError, tried

Arguments = dict[str, Any]

_TWO_MASKS = (
    "images whose tokens see each other in both directions, with a model that was patched with a "
    "mask: that of the images would be lost. Patch it without mask=."
)
_SAME_BATCH = (
    "Feed every rank of the group the same rows: the same data (call set_seed before you make some "
    "at random), the same sampler and seed, dispatch_batches=False. Call the model alike on all of "
    "them: in training or in evaluation mode, with the same arguments."
)
_SAME_IMAGES = (
    " What is drawn at random for an image must not depend on the rank or on a worker of its "
    "dataloader."
)


class ShardedPass(SimpleNamespace):
    """A forward pass over a shard, which goes in the place of `longctx_shard` once all ranks of the
    group have accepted it. Not a dataclass or tuple: FSDP searches those for tensors."""

    row: Descriptor
    positions: Tensor
    """`[L]`: positions of this rank's tokens in their documents, by the layout."""
    num_rows: int
    num_tokens: int
    """L, of what this rank was given."""
    mask: Mask | None
    routed: bool
    """Whether the pass returns router logits."""
    rows: RowsPass | None
    """The whole rows that the model has cut; None where it was given a shard."""
    count: Any
    """Tokens of the whole step that have a loss, where the caller gave their number."""
    shift_labels: Tensor | None
    num_labels: int | None
    """This rank's tokens that have a loss; None where the batch has no labels."""
    group_labels: int
    """Tokens of all ranks of the group that have a loss."""

    @property
    def wanted(self) -> str:
        """Says what was given and what is asked for, in words."""
        labels = "without" if self.num_labels is None else "with"
        if self.rows is None:
            return f"a shard {labels} labels"
        columns = "" if self.rows.columns is None else f" of columns {list(self.rows.columns)}"
        how = f" {self.rows.scores}" if self.rows.wanted == "scores" else ""
        images = f", {self.rows.images}" if self.rows.images else ""
        shared = self.rows.shared
        alike = "" if shared is None else f", begun alike, checksum {shared.checksum():08x}"
        return f"whole rows {labels} labels for {self.rows.wanted}{columns}{how}{images}{alike}"


@dataclass(frozen=True, kw_only=True)
class DecoderCalls:
    """Turns each call of a patched decoder into a sharded or a stock forward pass."""

    group: SequenceGroup
    decoder: nn.Module
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
    chunks: Mapping[int, int | None] = field(default_factory=dict)
    """Tokens of the chunks in which layers attend, by the layer's number; looked up once too."""
    seen: set[LayerKind] = field(default_factory=set)
    """Kinds of layers that have run."""
    prepared: dict[bytes, ShardedCall] = field(default_factory=dict)
    """Calls whose plans were made ahead, by the rows of their batch."""

    def read(
        self,
        given: Mapping[str, Any],
        rows: RowsPass | None = None,
        num_labels: int | None = None,
    ) -> ShardedPass:
        """A sharded pass with these arguments of the model, or of its decoder.

        `rows`: what they were cut from, by the model itself.

        Raises ValueError for a batch that this rank can't compute with.
        """
        given = dict(given)
        row, tokens = Descriptor.read(given.pop(SHARD_KEY)), tokens_of((), given)
        check_place(row, self.group)
        positions = row.documents.positions(self._held(row, tokens.device))
        routed = wants_router_logits(self.decoder, given)
        problem = (
            vocabulary_problem(self.decoder, 0 if rows is None else rows.least_id, row.most_id)
            or self._beyond_reach(row.longest)
            or (None if rows is not None else input_problem(given, positions[None], routed))
        )
        if problem is not None:
            raise ValueError(problem)
        is_cut = rows is None or not rows.images
        return ShardedPass(
            row=row,
            positions=positions,
            num_rows=len(tokens),
            num_tokens=tokens.shape[1] if is_cut else len(positions),
            mask=self._mask(row, () if rows is None else rows.image_spans),
            routed=routed,
            rows=rows,
            count=given.get("num_valid_tokens") if rows is None else rows.num_items,
            shift_labels=given.get("shift_labels"),
            num_labels=num_labels,
        )

    def agree(self, read: Callable[[], ShardedPass]) -> ShardedPass:
        """Returns what `read` makes of this rank's batch, once all ranks have agreed to compute it.

        Collective over the group.

        Raises:
            ValueError: on every rank, what `read` raises on one of them, or a table of what each
                one holds if these are not shards of one batch.
            SequenceParallelismError: on every rank, if an earlier pass did not run as planned.
        """
        found = tried(self.group.everyone, Meeting.BATCH, lambda: self._checked(read))
        documents = found.row.documents
        proposed = self.checkpoints.propose(
            self.decoder, found.num_rows * documents.num_tokens, found.positions.device
        )
        told = self.group.require_shards(
            Meeting.BATCH,
            documents,
            found.num_tokens,
            self._agreed_state(found),
            (proposed, found.num_labels or 0),
            whole="the same batch",
            fix=_SAME_BATCH + _SAME_IMAGES * bool(found.rows and found.rows.images),
        )
        if not min(self.group.layout(documents).sizes):
            raise ValueError(
                f"{documents.num_tokens} tokens over {self.group.num_ranks} ranks leaves a rank "
                "without tokens, which a model can't compute. Pad the rows; "
                "SequenceShardCollator does."
            )
        found.group_labels = sum(num_labels for _, num_labels in told)
        self.checkpoints.begin(self.decoder, min(whole_layers for whole_layers, _ in told))
        return found

    def arguments(self, args: tuple[Any, ...], given: Arguments) -> Arguments:
        """The decoder's keyword arguments for this pass.

        Collective for a shard on which the ranks have not agreed, since the model's forward was
        called without its hooks, or its decoder alone.
        """
        kwargs = dict(given)
        if isinstance(mask := kwargs.get("attention_mask"), dict) and not mask:
            del kwargs["attention_mask"]  # it stood in place of masks that the model would make
        if "logits_to_keep" in kwargs:  # the head leaves tokens out, so Gemma 4's layers need not
            kwargs["logits_to_keep"] = 0
        found = kwargs.pop(SHARD_KEY, None)
        if found is None:
            self._begin_stock(args, kwargs)
            return kwargs | {transformers_api.CALL_KEY: None}
        if not isinstance(found, ShardedPass):
            whole = kwargs | {SHARD_KEY: found} | ({"input_ids": args[0]} if args else {})
            found = self.agree(lambda: self.read(whole))
        placed: Arguments = {}
        if found.rows is not None and found.rows.images:
            held = self._held(found.row, kwargs["inputs_embeds"].device)
            kwargs, placed = own_tokens(kwargs, held)
        if (option := option_problem(kwargs)) is not None:  # of a forward that handed it on
            raise ValueError(option)
        return kwargs | self._sharded(found) | placed

    def make_plans(self, shard: Tensor) -> None:
        """Make the plans of a batch that is to come. A batch that can't be used is skipped: its
        forward pass raises the error, on all ranks."""
        try:
            row = Descriptor.read(shard)
            mask = self._mask(row)
        except ValueError:
            return
        call = ShardedCall(self.group, row, mask, self.seen, self.chunks)
        call.make_plans()
        self.prepared[row.key] = call

    def _begin_stock(self, args: tuple[Any, ...], kwargs: Arguments) -> None:
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
        if not self.decoder.training:
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
        tokens, decoder = tokens_of(args, kwargs), self.decoder
        self._check_reach(tokens.shape[1], kwargs.get("position_ids"))
        num_tokens = tokens.shape[0] * tokens.shape[1]
        proposed = self.checkpoints.propose(decoder, num_tokens, tokens.device)
        self.checkpoints.begin(decoder, proposed)

    def _beyond_reach(self, num_tokens: int) -> str | None:
        """Says why documents of so many tokens are too long for the model's RoPE."""
        is_within = self.reach is None or num_tokens <= self.reach
        if is_within or self.group.config.allow_beyond_reach:
            return None
        config: Any = self.decoder.config
        return reach_problem(config, num_tokens)

    def _check_reach(self, length: int, positions: Tensor | None) -> None:
        """The same of rows on the stock path; positions, where given, tell their documents."""
        problem = self._beyond_reach(length)
        if problem is not None and positions is not None:
            problem = self._beyond_reach(int(positions.max()) + 1)
        if problem is not None:
            raise ValueError(problem)

    def _uncountable(self, num_tokens: int) -> str | None:
        """Says why transformers' own forward can't compute with so many tokens of all rows."""
        return None if self.countable is None else self.countable.problem(num_tokens)

    def _check_countable(self, tokens: Tensor) -> None:
        if (problem := self._uncountable(tokens.shape[0] * tokens.shape[1])) is not None:
            raise ValueError(
                f"{problem}. In evaluation call the model with labels within "
                "handle.sharing_evaluation(), which cuts up what they can't count; generate from "
                "fewer tokens at a time."
            )

    def _held(self, row: Descriptor, device: torch.device) -> Tensor:
        """Places in the row of this rank's tokens."""
        return self.group.layout(row.documents).positions(self.group.group_rank, device)

    def _mask(self, row: Descriptor, spans: Spans = ()) -> Mask | None:
        """The user's mask of a row; or that of images whose tokens see each other, at `spans`."""
        if not spans:
            return None if self.mask is None else made_mask(self.mask, row)
        if self.mask is not None:
            raise ValueError(_TWO_MASKS)
        return spans_mask(row.documents.num_tokens, spans)

    def _sharded(self, found: ShardedPass) -> Arguments:
        """Further arguments of the decoder for a pass that all ranks have accepted."""
        documents, num_rows = found.row.documents, found.num_rows
        is_plain = (
            documents.is_one
            and found.mask is None
            and not (self.group.config.shifted_group and self.decoder.training)
            and not found.routed
            and self._uncountable(num_rows * found.num_tokens) is None
            and (self.own_forward_trains or not self.decoder.training)
        )
        if self.group.num_ranks == 1 and is_plain and not self.checkpoints.replays_attention:
            return {transformers_api.CALL_KEY: None}
        call = self.prepared.pop(found.row.key, None)
        if call is None or call.mask != found.mask:
            call = ShardedCall(self.group, found.row, found.mask, self.seen, self.chunks)
        call.fire_check, call.positions = self.first_step.begin(self.decoder), found.positions
        call.only_windows_are_masked = found.rows is not None and found.rows.only_windows_see_ahead
        call.shared = None if found.rows is None else found.rows.shared
        return {
            "attention_mask": transformers_api.no_mask(call, num_rows, call.positions.device),
            "position_ids": call.positions.expand(num_rows, -1),
            "use_cache": False,
            transformers_api.CALL_KEY: call,
        }

    def _checked(self, read: Callable[[], ShardedPass]) -> ShardedPass:
        """Returns what `read` returns, unless attention went wrong in earlier passes, or adapters
        that came after `patch` can't be covered."""
        if (misfire := self.first_step.misfire(self.decoder)) is not None:
            raise SequenceParallelismError(misfire)
        if (adapter := adapter_problem(self.first_step.model)) is not None:
            raise UnsupportedModelError(adapter)
        return read()

    def _agreed_state(self, found: ShardedPass) -> str:
        """Says what must be the same on all ranks before a forward pass, in words."""
        mask = 0 if found.mask is None else found.mask.checksum
        is_due = self.first_step.is_due(self.decoder)
        return (
            f"{found.num_rows} rows, checksum {found.row.checksum:08x}, "
            f"{'training' if self.decoder.training else 'evaluating'}, "
            f"gradients {'on' if torch.is_grad_enabled() else 'off'}, mask {mask:08x}, "
            f"router logits {'on' if found.routed else 'off'}, "
            f"first step {'now' if is_due else 'done or not training'}, {found.wanted}"
            f"{'' if found.count is None else f', {float(found.count)!r} tokens in the step'}"
        )
