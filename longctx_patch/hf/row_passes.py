"""Whole rows in, whole rows out: batches as any trainer makes them, equal on all ranks of a group.

The patched model cuts such a batch itself and gives back one replica's loss, with the same value on
every rank of the group. A trainer that takes these ranks for one replica, and averages gradients
over all ranks as DDP and FSDP do, trains with one process's numbers.

In evaluation mode each rank runs whole rows by itself, through the stock path, unless the ranks
share evaluation too (`PatchHandle.sharing_evaluation`). With one rank per sequence, rows that can't
be read here take the stock path as well: it is one process's.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.data import SHARD_KEY, SequenceShardCollator
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.data.rows import Row
from longctx_patch.data.stock_rows import LENGTHS, check_lengths_alone
from longctx_patch.data.whole_rows import (
    READ,
    WANTED_KEY,
    ContradictionError,
    HeadScores,
    RowsPass,
    read_rows,
)
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call import image_rows
from longctx_patch.hf.call.decoder_call import DecoderCalls, ShardedPass
from longctx_patch.hf.call.inputs import option_problem, tokens_of
from longctx_patch.hf.call.stock_documents import OF_MASKS, check_one_document
from longctx_patch.hf.layers.checkpointing import GRADIENTS_IN_EVALUATION
from longctx_patch.hf.loss.lm_head import LossPasses, plain_head
from longctx_patch.hf.loss.shard_loss import would_have_gradients
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.stock_model import input_bias, stock_model
from longctx_patch.hf.row_outputs import (
    ASKING,
    OTHER_OUTPUTS,
    Request,
    number_of,
    request_of,
    require_known_group,
    whole_outputs,
)
from longctx_patch.hf.sharing import CannotShareError, Sharing

Arguments = dict[str, Any]

NO_MASKS: Arguments = {"attention_mask": {}}
"""Else Gemma 3 makes masks of all pairs of tokens, which the decoder would not use."""


_APART = (
    "packed rows: documents begin anew in the recurrent layers of this model, as if each were "
    "alone. transformers' own pass keeps them apart in attention only, and carries states of one "
    "into the next unless its kernels are told (cu_seq_lens_q, seq_idx). Losses differ."
)


class RowPasses:
    """Cuts the batches of one patched model that are whole rows."""

    def __init__(self, model: PreTrainedModel, group: SequenceGroup) -> None:
        self.shares_evaluation = False
        """Whether the ranks of a group share whole rows with labels in evaluation too."""
        self.head_scores: Callable[[], HeadScores | None] = lambda: None
        """How our head computes what is asked of TRL's fused head, with fewer matrix products and
        float32 logits; None where it can't, since its gradients are made in forward."""
        self._model, self._group = model, group
        self._calls: DecoderCalls
        self._losses: LossPasses
        self._sharing: Sharing
        self._stock = stock_model(model)
        self._is_recurrent = bool(transformers_api.recurrent_modules(model))
        self._of_images = (
            image_rows.ARGUMENTS if transformers_api.reads_images(model) else frozenset()
        )
        self._collate = SequenceShardCollator(
            group.config, group_rank=group.group_rank, pad_token_id=0
        )

    def bind(self, calls: DecoderCalls, losses: LossPasses) -> Callable[[], None]:
        """Hook the model around all other hooks; return a function that undoes it."""
        self._calls, self._losses = calls, losses
        self._sharing = Sharing(self._model, calls)
        return transformers_api.hook(
            self._model, self._before, self._after, around=True, also_after_errors=True
        )

    def described(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Returns what `longctx_shard` will say of whole rows to come; None where they can't be
        read, which their forward pass says."""
        try:
            return self._cut(batch, Request("loss"))[0][SHARD_KEY]
        except Exception:  # raised here it would end one rank alone; the pass tells all of them
            return None

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Arguments
    ) -> tuple[Any, Arguments]:
        self._losses.end()  # an interrupted pass may have left it open
        given = self._named(args) | kwargs
        require_known_group(
            given.get("num_items_in_batch"), self._group.num_ranks, training=self._model.training
        )
        are_whole = self._are_shared(given)
        if not are_whole and given.get(SHARD_KEY) is None:
            self._check_documents(given)
            return args, kwargs
        shard, rows, problem = given, None, None
        try:
            if are_whole:
                shard, rows = self._shard_of(given)
        except Exception as error:
            is_refused = isinstance(error, CannotShareError)
            if self._group.num_ranks == 1 and WANTED_KEY not in given and not is_refused:
                self._check_documents(given)
                return args, kwargs
            problem = error
        found = self._calls.agree(lambda: self._read(shard, rows, problem))
        self._losses.open(found)
        masks = NO_MASKS if self._of_images else {}
        return (), shard | masks | {SHARD_KEY: found}

    def _read(
        self, shard: Arguments, rows: RowsPass | None, problem: Exception | None
    ) -> ShardedPass:
        """This rank's shard, as the ranks compare it; raises what is wrong with it."""
        if problem is not None:
            raise problem
        if rows is None and image_rows.has_images(shard):
            raise ValueError(image_rows.OF_SHARDS)
        tokens = tokens_of((), shard).shape[:2] if rows is None else None
        return self._calls.read(shard, rows, self._losses.loss.num_labels(shard, tokens))

    def _check_documents(self, given: Arguments) -> None:
        """Refuse documents that the stock path would not see, or that are said in two ways."""
        check_lengths_alone(given, self._stock)
        if not self._stock.finds_documents:
            check_one_document(given, OF_MASKS)
        if any(given.get(name) is not None for name in LENGTHS):
            try:
                read_rows(given, self._stock)
            except ContradictionError:
                raise
            except Exception:  # the stock path runs what can't be read here
                return

    def _named(self, args: tuple[Any, ...]) -> Arguments:
        """Positional arguments by name; looked up in each pass, since TRL replaces forwards."""
        names = inspect.signature(self._model.forward).parameters if args else ()
        return dict(zip(names, args, strict=False))

    def _after(self, _: nn.Module, args: tuple[Any, ...], kwargs: Arguments, outputs: Any) -> Any:
        found = kwargs.get(SHARD_KEY)
        accepted = found if isinstance(found, ShardedPass) else None
        rows = None if accepted is None else accepted.rows
        outputs = self._losses.close(rows, outputs)
        if accepted is None or rows is None or outputs is None:
            return outputs
        documents = accepted.row.documents
        return whole_outputs(outputs, rows, documents, self._group, self._model.config)

    def _are_shared(self, given: Arguments) -> bool:
        """Says whether these are whole rows, which the ranks of the group compute together."""
        if given.get(WANTED_KEY) is not None:
            return True
        if given.get(SHARD_KEY) is not None:
            return False
        if cache := transformers_api.cache_given(given):
            self._check_cache(cache)
            return False
        if self._model.training:
            return True
        if given.get("labels") is None:
            return False
        # In evaluation mode by mistake, one rank would leave the others waiting for it.
        learns = self._group.num_ranks > 1 and would_have_gradients(self._model)
        return self.shares_evaluation or learns

    def _shard_of(self, given: Arguments) -> tuple[Arguments, RowsPass]:
        """The model's arguments for this rank's shard of whole rows."""
        self._check(given)
        request = self._request(given)
        shard, rows = self._with_images(given, *self._cut(given, request))
        others = {name: value for name, value in given.items() if name not in READ | ASKING}
        for name in image_rows.KINDS:  # of which positions, or a mask, have been made
            others.pop(name, None)
        if request.wanted == "scores":
            del others["fused_lm_head"]
        return others | {"num_items_in_batch": None, "use_cache": False} | shard, rows

    def _request(self, given: Arguments) -> Request:
        request = request_of(given, self._group.config.loss)
        if request.wanted != "fused" or self._group.config.loss != "chunked":
            return request
        how = None if plain_head(self._model) is None else self.head_scores()
        return request if how is None else request._replace(wanted="scores", scores=how)

    def _cut(self, given: Mapping[str, Any], request: Request) -> tuple[Arguments, RowsPass]:
        whole = read_rows(given, self._stock)
        if any(start for start, _ in whole.spans) and (bias := input_bias(self._model)):
            raise ValueError(
                f"rows padded on the left with {bias}: in transformers this bias of the padding "
                "flows into the convolution of a row's first tokens. Pad on the right "
                "(tokenizer.padding_side='right')."
            )
        if self._is_recurrent and whole.is_packed and self._model.training:
            warnings.warn(_APART, stacklevel=2)  # once, since the message stays the same
        num_items = number_of(given.get("num_items_in_batch"))
        if num_items == 0 and any(bool((row.next_labels() >= 0).any()) for row in whole.rows):
            raise ValueError("num_items_in_batch=0 with labels: it counts the step's labels.")
        least = min((int(row.ids.min()) for row in whole.rows if len(row.ids)), default=0)
        rows = RowsPass(num_items, whole.spans, whole.length, whole.is_packed, least, *request)
        own_rows: Sequence[Row] = whole.rows
        if (joined := self._sharing.joined(whole, given)) is not None:
            own_rows, rows = [joined[0]], rows._replace(shared=joined[1])
        shard: Arguments = dict(self._collate.shard(own_rows))
        if request.wanted == "logits":
            del shard["labels"], shard["shift_labels"]
        described = shard.pop(SHARD_KEY)
        device = given["input_ids"].device
        on_device = {name: value.to(device) for name, value in shard.items()}
        return on_device | {SHARD_KEY: described}, rows

    def _with_images(
        self, given: Arguments, shard: Arguments, rows: RowsPass
    ) -> tuple[Arguments, RowsPass]:
        """The same for rows with images: whole ids and positions, which the decoder cuts."""
        if not self._of_images or not image_rows.has_images(given):
            return shard, rows
        image_rows.check_images(self._model, given)
        length = Descriptor.read(shard[SHARD_KEY]).documents.num_tokens
        whole, rows = image_rows.whole_inputs(self._model, given, rows, length)
        return shard | whole, rows

    def _check_cache(self, name: str) -> None:
        """Refuse a cache in training, on this rank at once: a callback may generate on one rank."""
        if self._model.training and self._group.num_ranks > 1:
            raise ValueError(
                f"{name} in training: a cache holds one rank's keys only. To generate, "
                "call model.eval() first, and model.train() after it; else leave the cache out."
            )

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuse what outputs of whole rows can't have."""
        if not self._model.training and would_have_gradients(self._model):
            raise ValueError(GRADIENTS_IN_EVALUATION)
        for name, fix in _REFUSED.items():
            if given.get(name) is not None:
                raise ValueError(f"{name} with whole rows: {fix}")
        known = READ | ASKING | _OWN | self._of_images
        others = {name: given[name] for name in given if name not in known}
        if option := option_problem(others):
            raise ValueError(option)
        for name, usual in _USUAL.items():
            asked = given.get(name)
            asked = getattr(self._model.config, name, usual) if asked is None else asked
            if asked is not usual:
                raise ValueError(f"{name}={asked} with whole rows: {OTHER_OUTPUTS}")


_OWN = frozenset({"fused_lm_head", "num_items_in_batch"})
"""Arguments that trainers give to a model, not to its decoder."""
_USUAL = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
_REFUSED = {
    SHARD_KEY: "this batch is a shard already. Give whole rows.",
    **dict.fromkeys(
        transformers_api.CACHE_NAMES, "a cache holds one rank's keys only. Leave it out."
    ),
    "inputs_embeds": "padding and documents are read with input_ids. Give input_ids alone.",
    "shift_labels": "labels of whole rows are unshifted, so this looks like a shard whose "
    "longctx_shard is missing. Pass the batch of SequenceShardCollator unchanged, or whole rows "
    "with labels alone.",
    "num_valid_tokens": "it belongs to batches of SequenceShardCollator. Give num_items_in_batch, "
    "by which the sum of the replica's token losses is divided.",
}
