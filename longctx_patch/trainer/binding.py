"""Decides which models of a trainer are patched, and whose checkpointing runs."""

import logging
from collections.abc import Callable
from typing import Any

from longctx_patch.config import LongContextConfig
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.patching import patch

logger = logging.getLogger(__name__)

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")
"""Names of one setting: transformers renamed it in 5.23."""


def patch_for_trainer(model: Any, given: LongContextConfig | PatchHandle) -> PatchHandle:
    """The handle of a trainer's model, which is patched here unless `given` is its handle.

    Collective. Raises ValueError or UnsupportedModelError, with the model unchanged.
    """
    if isinstance(model, str):
        raise ValueError(
            f"model={model!r}: transformers' Trainer takes a model, and TRL's trainers load one by "
            f"its name. Give AutoModelForCausalLM.from_pretrained({model!r})."
        )
    if isinstance(given, LongContextConfig):
        if is_patched(model):
            raise ValueError(
                "the trainer's model is patched already: give its handle, long_context=handle, or "
                "let the trainer patch it."
            )
        return patch(model, given)
    if transformers_api.causal_lm(model) is not given.model:
        raise ValueError(
            "long_context is the handle of another model than the trainer's. Give the handle that "
            "patch(model, config) returned for this one."
        )
    return given


def patch_reference(model: Any, config: LongContextConfig) -> PatchHandle:
    """Patch a model whose outputs another one learns from.

    TRL makes it with the attention of the trained model, whose name is then that of a patch; it is
    set back to its stock attention first. Collective.
    """
    base = transformers_api.causal_lm(model)
    stock_of = {name: stock for stock, name in transformers_api.NAME_OVER_STOCK.items()}
    stock = stock_of.get(transformers_api.attention_implementation(base))
    if stock is not None:
        base.set_attn_implementation(stock)
    return patch(model, config)


def is_patched(model: Any) -> bool:
    """Says whether attention of the model is named as a patch names it."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name in transformers_api.NAME_OVER_STOCK.values()


def settle_checkpointing(args: Any, config: LongContextConfig) -> None:
    """Switch transformers' checkpointing off where the config has a policy of its own.

    Who asked for it is warned, once on each node. TRL switches it on by default, which
    can't be told from a user who asked: nothing is said there.
    """
    name = _SWITCHES[0]
    if config.checkpoint == "none" or not getattr(args, name, False):
        return
    was_asked = type(args).__dataclass_fields__[name].default is not True
    level = logging.WARNING if was_asked and args.should_log else logging.INFO
    logger.log(
        level,
        "gradient_checkpointing=True gives way to LongContextConfig(checkpoint=%r), which "
        "recomputes the layers. Set one of them only.",
        config.checkpoint,
    )
    for name in _SWITCHES:
        if hasattr(args, name):
            setattr(args, name, False)


def settle_reading(args: Any, config: LongContextConfig) -> None:
    """Let each process read streams by itself, as it reads tables.

    By default Accelerate's first process reads a stream for all. It counts the ranks of a group as
    replicas, gives all groups the same rows, and can't skip rows where a run goes on.
    """
    if config.sequence_degree > 1 and args.accelerator_config.dispatch_batches is None:
        args.accelerator_config.dispatch_batches = False


def keep_checkpointing(handle: PatchHandle) -> Callable[[], None]:
    """Let nobody switch the config's checkpointing off and on; return a function that undoes it.

    TRL switches it off while a reference runs, and then on again as transformers' own.
    """
    if handle.config.checkpoint == "none":
        return lambda: None
    names = [f"{switch}_{verb}" for switch in _SWITCHES for verb in ("enable", "disable")]
    names = [name for name in names if hasattr(handle.model, name)]
    for name in names:
        vars(handle.model)[name] = _do_nothing

    def undo() -> None:
        for name in names:
            vars(handle.model).pop(name, None)

    return undo


def _do_nothing(*_: Any, **__: Any) -> None:
    """In place of a switch of transformers' checkpointing."""
