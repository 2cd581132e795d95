"""Trainers of models that read images: which of TRL's are compared with one process, and replicas
that would not call the image encoder alike."""

from collections.abc import Iterable, Mapping
from typing import Any

from longctx_patch.hf.call.images import has_images
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.model import transformers_api
from longctx_patch.plugin.together import of_all_ranks
from longctx_patch.trainer.axis import num_processes
from longctx_patch.trainer.refusals import trl_trainers

SEEING = frozenset({"SFTTrainer", "DPOTrainer", "KTOTrainer"})
"""Trainers of TRL that were compared on rows with images."""


def image_problems(trainer: Any) -> Iterable[str]:
    """Why a trainer of TRL can't train a model that reads images, in words."""
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


def require_images_alike(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse a step in which some replicas have images and others none, where FSDP2 shards the
    encoder: a rank gathers its weights and reduces its gradients only if it runs it, and one that
    doesn't would leave the others waiting. Collective over the world where there are replicas.

    Raises ValueError on all ranks."""
    handle: PatchHandle = trainer.long_context_handle
    num_groups = num_processes() // handle.config.sequence_degree
    if num_groups == 1 or not trainer.accelerator.is_fsdp2:
        return
    if not transformers_api.reads_images(handle.model):
        return
    found = of_all_ranks(has_images(inputs))
    if len(set(found)) > 1:
        without = [rank for rank, has_some in enumerate(found) if not has_some]
        raise ValueError(
            f"no images in the batch of ranks {without}, in a step in which other ranks have some: "
            "FSDP2 shards the image encoder, and ranks that don't run it would leave the others "
            "waiting. Give each batch an image, train on rows without images apart, or train "
            "without FSDP2."
        )
