"""Trainers of models that read images: which of TRL's are compared with one process, and batches
without images, for which the image encoder doesn't run and has no gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from longctx_patch.hf.call.image_rows import PIXELS
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.model import transformers_api
from longctx_patch.rules.launched import flag
from longctx_patch.rules.together import of_all_ranks
from longctx_patch.trainer.axis import num_processes
from longctx_patch.trainer.refusals import trl_trainers

SEEING = frozenset({"SFTTrainer", "DPOTrainer", "KTOTrainer"})
"""Trainers of TRL that were compared on rows with images."""


def image_problems(trainer: Any) -> Iterable[str]:
    """Says why a trainer of TRL can't train a model that reads images, in words."""
    name = next(iter(trl_trainers(type(trainer))), None)
    if name is None or name in SEEING:
        return
    model = trainer.long_context_handle.model
    if transformers_api.reads_images(model):
        yield (
            f"{name} with {type(model).__name__}, which reads images: of TRL's trainers "
            f"{', '.join(sorted(SEEING))} were compared with one process on such models. Train its "
            "text model (longctx_patch.plugin.text_model), or use transformers' Trainer."
        )


def trains_encoder(model: Any) -> bool:
    """Says whether something is trained outside of the text model and its head."""
    if not isinstance(model, nn.Module):
        return False  # a name, which is refused where the model is patched
    base = transformers_api.causal_lm(model)
    if not transformers_api.reads_images(base):
        return False
    text = [transformers_api.decoder_of(base), base.get_output_embeddings()]
    of_text = {id(weight) for part in text for weight in part.parameters()}
    return any(p.requires_grad and id(p) not in of_text for p in base.parameters())


def has_unused_weights(args: Any, model: Any) -> bool:
    """Says whether DDP has to look for weights that a batch without images doesn't use: else each
    rank would keep gradients of its own, silently where they are summed over several batches."""
    is_sharded = bool(args.fsdp) or flag("ACCELERATE_USE_FSDP")
    return num_processes() > 1 and not is_sharded and trains_encoder(model)


def unused_problems(args: Any, model: Any) -> Iterable[str]:
    """Says what keeps DDP from looking for unused weights, in words."""
    if not has_unused_weights(args, model):
        return
    why = "its image encoder has no gradients in a batch without images, for which DDP has to look"
    if args.ddp_find_unused_parameters is False:
        yield f"ddp_find_unused_parameters=False with {type(model).__name__}: {why}. Leave it out."
    given = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    if getattr(args, "gradient_checkpointing", False) and given.get("use_reentrant"):
        yield (
            f"use_reentrant=True in gradient_checkpointing_kwargs with {type(model).__name__}: "
            f"{why}, which can't be combined. Use False, or LongContextConfig("
            "checkpoint='attention')."
        )


def settle_unused(args: Any, model: Any) -> None:
    """Let DDP look for unused weights where there are some. transformers does so, but not beside
    its own checkpointing."""
    if has_unused_weights(args, model):
        args.ddp_find_unused_parameters = True


def require_images_alike(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse a step in which some replicas have images, or videos, and others none, where FSDP2
    shards the encoder: a rank gathers its weights and reduces its gradients only where it runs it,
    and would leave the others waiting. Collective over the world where there are replicas.

    Raises ValueError on all ranks."""
    handle: PatchHandle = trainer.long_context_handle
    num_groups = num_processes() // handle.config.sequence_degree
    if num_groups == 1 or not trainer.accelerator.is_fsdp2:
        return
    if not transformers_api.reads_images(handle.model):
        return
    everyones = of_all_ranks(tuple(inputs.get(name) is not None for name in PIXELS))
    for name, have in zip(PIXELS, zip(*everyones, strict=True), strict=True):
        if len(set(have)) > 1:
            without = [rank for rank, has_some in enumerate(have) if not has_some]
            raise ValueError(
                f"no {name} in the batch of ranks {without}, in a step in which other ranks have "
                "some: FSDP2 shards the image encoder, and ranks that don't run it would leave the "
                "others waiting. Give each batch some, train on rows without them apart, or train "
                "without FSDP2."
            )
