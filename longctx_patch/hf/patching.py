"""Bind one model to a sequence group, and unbind it.

`patch` checks everything, then switches the model to our attention function, hooks its decoder and
gives it the loss law. Classes are never touched. A batch that carries `longctx_shard` (from
`SequenceShardCollator`) is a shard. Any other is whole rows: in training they are cut
(`row_passes.py`), and in evaluation, such as by `generate`, they run on the stock path.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from longctx_patch.config import LongContextConfig, require_config
from longctx_patch.engine.groups import SequenceGroup, make_sequence_group
from longctx_patch.families.checks import check_model_config, check_modules
from longctx_patch.families.facts import chunks_of
from longctx_patch.families.rope_facts import reachable_length
from longctx_patch.hf.call.decoder_call import DecoderCalls
from longctx_patch.hf.call.fire_check import FirstStep
from longctx_patch.hf.call.latents import bind_latents
from longctx_patch.hf.call.mixer_kernels import countable
from longctx_patch.hf.call.mixers import bind_mixers, check_mixers
from longctx_patch.hf.call.row import MaskFactory
from longctx_patch.hf.call.sharded import sharded_attention, with_whole_router_logits
from longctx_patch.hf.call.temperature import bind_temperature
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.hf.layers.lora_products import bind_adapters
from longctx_patch.hf.layers.mlp_tiles import bind_mlps
from longctx_patch.hf.loss.lm_head import LossPasses
from longctx_patch.hf.loss.shard_loss import ShardLoss
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import lacks_convolution
from longctx_patch.hf.model.transformers_api import name_own_blocks
from longctx_patch.hf.row_passes import RowPasses
from longctx_patch.kernels import available
from longctx_patch.rules.versions import warn_untested


def patch(
    model: nn.Module,
    config: LongContextConfig,
    *,
    mask: MaskFactory | None = None,
    group: SequenceGroup | None = None,
) -> PatchHandle:
    """Run a Hugging Face causal language model over sequences that are cut over ranks.

    Collective: every process calls it, after torch.distributed is initialised (`Accelerator()`
    does that) and before DDP, FSDP or torch.compile wrap the model. Adapters come before or after.

    A training batch is whole rows, as any trainer batches them: equal on all ranks of the group,
    padded on either side (`attention_mask`) or packed (`position_ids` that start anew), with
    `labels`. The model cuts it itself, and computes what transformers does without a cache; packed
    documents are apart in recurrent layers too, where transformers may carry states over.
    `out.loss` is that of one replica, the same on every rank of the group: the sum of its token
    losses over `num_items_in_batch`, or over their number (0 where no token has a label). In
    evaluation mode whole rows run on the stock path on each rank alone, but see
    `PatchHandle.sharing_evaluation`.

    Or it is a shard, of `SequenceShardCollator`: then `out.loss` is this rank's share of the loss
    (average it over the ranks to report it), and `out.logits` are of its tokens.

    Gradients are right once they are averaged over all ranks, which DDP and FSDP do. With labels
    there are no logits, since they would fill the memory, and a loss can go backward once; use
    `loss="logits"` to get them and to go more often.

    Args:
        model: for causal language modelling, of a family that `longctx families` lists as
            supported, or a PEFT model around one.
        config: degrees, layout, plan, kernel, checkpoint policy, MLP tiles and loss; the same on
            every rank.
        mask: for other than causal attention, a function from the length of a padded row to its
            `Mask` (`longctx_patch.masks` has block-sparse ones, prefixes and more). Documents and
            sliding windows restrict it further (a window only looks back: later keys that the mask
            allows stay visible). With a mask, the stock path, and so `generate`, is refused.
        group: the ranks that share rows, if they exist already; it stays open at `unpatch`. By
            default the processes make one. With a `virtual_group` ranks are threads of this
            process, each with a copy of the model: then calls are collective over the threads,
            rows are whole, and you take the mean of the copies' gradients.

    The first training step proves that attention crossed the ranks, or raises
    `SequenceParallelismError`. Modules of your own in the decoder, such as an MLP or a norm, must
    compute each token by itself: that step tries each with one token, where it has neither hooks
    nor dropout. What your own code mixes elsewhere, in a layer's forward or a hook, is not seen.
    The first batch with a document beyond what the model's RoPE reaches raises ValueError on all
    ranks, unless `allow_beyond_reach` is set.

    Raises:
        UnsupportedModelError: the model has something that would silently go wrong.
        ValueError: the degrees don't fit the world, the group is one of another config, or the
            model is patched already.
        TypeError: `config` is none.
        In all cases the model is unchanged.

    Example:
        >>> handle = patch(model, LongContextConfig(ulysses_degree=2, ring_degree=2))
        >>> loss = model(input_ids=ids, labels=ids).loss  # the same on ranks that share the rows
        >>> handle.unpatch()
    """
    require_config(config)
    transformers_api.check_version()
    warn_untested()
    base = transformers_api.causal_lm(model)
    stock = _checked_attention(base)
    _check_loss_and_weights(base)
    _check_arguments(config, mask, group)
    check_model_config(base.config, config)
    check_modules(model, transformers_api.attention_modules(base))
    check_mixers(base, config, mask)
    handle = _unbound_handle(base, config, mask, group)
    try:
        _bind(handle, stock)
    except BaseException:
        handle.unpatch()
        raise
    return handle


def _unbound_handle(
    base: PreTrainedModel,
    config: LongContextConfig,
    mask: MaskFactory | None,
    given: SequenceGroup | None,
) -> PatchHandle:
    group = given or make_sequence_group(config)
    mixers = transformers_api.recurrent_modules(base)
    checkpoints = LayerCheckpoints(base, config.checkpoint, config.attention_kept)
    decoder: Any = transformers_api.decoder_of(base)
    calls = DecoderCalls(
        group=group,
        decoder=decoder,
        # Cached by length, since the function may look at every pair of tokens.
        mask=None if mask is None else lru_cache(maxsize=8)(mask),
        first_step=FirstStep(base, group, checkpoints),
        checkpoints=checkpoints,
        is_recurrent=bool(mixers),
        countable=countable(mixers),
        own_forward_trains=not any(map(lacks_convolution, mixers)),
        reach=reachable_length(decoder.config),
        chunks=chunks_of(decoder.config),
    )
    close = group.close if given is None else lambda: None  # a given group is its maker's
    return PatchHandle(base, calls, RowPasses(base, group), [close])


def _bind(handle: PatchHandle, stock: str) -> None:
    transformers_api.register(sharded_attention)
    handle._undo.append(transformers_api.bind_attention(handle.model, stock))
    handle._undo.append(bind_latents(handle.model, handle.config))
    loss = ShardLoss(handle.model, handle.group)
    handle._undo.append(_bind_decoder(handle, loss))
    handle._undo.append(transformers_api.bind_loss(handle.model, loss))
    handle._undo.append(loss.close)
    handle._undo.append(bind_mixers(handle.model))
    handle._calls.first_step.note_forwards()
    handle._undo.append(bind_temperature(handle.model))
    handle._undo.append(bind_adapters(handle.model))
    handle._undo.append(bind_mlps(handle.model, handle.config.mlp_tiles))
    handle._undo.append(handle._checkpoints.bind())
    handle._undo.append(handle._rows.bind(handle._calls, LossPasses(handle.model, loss)))
    handle._undo.append(name_own_blocks(handle.model))
    handle._undo.append(refuse_copies(handle.model))


def _checked_attention(base: PreTrainedModel) -> str:
    """The name of the model's stock attention, which the patch can stand in for."""
    stock = transformers_api.attention_implementation(base)
    if stock in transformers_api.NAME_OVER_STOCK.values():
        raise ValueError(
            "this model is patched already: call unpatch() on its handle before patching it again. "
            "If it is another model, it shares its config object with a patched one: build it from "
            "copy.deepcopy(config)."
        )
    if stock not in transformers_api.NAME_OVER_STOCK:
        raise ValueError(
            f"attn_implementation={stock!r}: outside sharded calls the model keeps its own "
            f"attention, which must be one of {', '.join(transformers_api.NAME_OVER_STOCK)}. "
            "Call model.set_attn_implementation('sdpa') first."
        )
    return stock


def _check_loss_and_weights(base: PreTrainedModel) -> None:
    if transformers_api.has_own_loss(base):
        raise ValueError(
            "the model has a loss_function of its own, which the patch would replace: it knows "
            "nothing of shards. Compute your loss from the logits instead, by the law in "
            "longctx_patch/loss/law.py, or leave model.loss_function as it was."
        )
    if getattr(base, "_tp_size", None) not in (None, 1):
        raise ValueError(
            f"the model is tensor parallel over {base._tp_size} ranks: attention heads would be "
            "cut twice. Load it without tp_plan."
        )


def _check_arguments(config: LongContextConfig, mask: object, group: SequenceGroup | None) -> None:
    if group is not None and group.config != config:
        raise ValueError(
            f"the group was made for {group.config}, not for {config}: give group.config as the "
            "config, or make the group of this one."
        )
    if mask is not None and not callable(mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}: give a function from the length of a padded row to "
            "its Mask, for example mask=bidirectional or mask=lambda n: prefix_lm(n, min(512, n))."
        )
    if mask is not None and config.shifted_group:
        raise ValueError(
            f"shifted_group={config.shifted_group} with mask=: groups cut causal attention. Give "
            "one of them."
        )
    if config.kernel not in ("auto", *available()):
        raise ValueError(
            f"kernel={config.kernel!r}: choose auto or one of {', '.join(available())}."
        )


def _bind_decoder(handle: PatchHandle, loss: ShardLoss) -> Callable[[], None]:
    # Llama 4 returns router logits, but has no loss for them.
    has_weight = hasattr(handle.model, transformers_api.router_weight(handle.model))

    decoder = transformers_api.decoder_of(handle.model)

    def before_decoder(
        decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, handle._calls.arguments(args, kwargs)

    def after_decoder(
        decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        handle._checkpoints.end(decoder, outputs[0])
        call = kwargs.get(transformers_api.CALL_KEY)
        if call is None:
            return outputs
        if call.fire_check is not None:
            call.fire_check.check_forward()
        loss.has_router_loss = has_weight and bool(getattr(outputs, "router_logits", None))
        return with_whole_router_logits(outputs, call)

    return transformers_api.hook(decoder, before_decoder, after_decoder)


NO_COPY = (
    "a patched model can't be copied or pickled: the copy would have the hooks and process groups "
    "of this one. Copy it before patch() or after unpatch(). To keep it, save its weights: "
    "model.save_pretrained(FOLDER), or torch.save(model.state_dict(), FILE) in place of "
    "torch.save(model, FILE). For another process, load the model and patch it there."
)
_HOOK = "__reduce_ex__"
"""What `pickle` and `copy.deepcopy` ask an object for, before they look at what it holds."""


def refuse_copies(model: nn.Module) -> Callable[[], None]:
    """Let both raise ValueError; return a function that undoes it."""

    def refuse(*_: object) -> NoReturn:
        raise ValueError(NO_COPY)

    vars(model)[_HOOK] = refuse

    def undo() -> None:
        del vars(model)[_HOOK]

    return undo
