"""Trained models as plain transformers and peft load them: an adapter, or all weights."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longctx_patch.checkpoints.train_state import without_frozen
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.recipes.model_card import how_to_load, mark_adapter
from longctx_patch.recipes.model_config import add_older_rope_names, write_config


def export_model(
    accelerator: Any, model: Any, tokenizer: Any, folder: Path, *, seed: int, step: int
) -> None:
    """Save the adapter or the model, its config and tokenizer; every process calls this.

    Args:
        accelerator, model: the model as it was prepared.
        tokenizer: saved beside it.
        folder: where to.
        seed: the run's: an adapter's base model may have random weights that were made from it.
        step: the last one that was done.

    Raises:
        ValueError: on all ranks, if a weight is not finite.
    """
    check_saved_weights(model, accelerator.device, step)
    inner = accelerator.unwrap_model(model)
    adapter = hasattr(inner, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
    weights = get_model_state_dict(model, options=options)  # collective; only rank 0 gets them
    if accelerator.is_main_process:
        write_model(inner, tokenizer, folder, without_frozen(weights, model), seed=seed)
    accelerator.wait_for_everyone()


def write_model(
    model: Any, tokenizer: Any, folder: Path, weights: dict[str, Tensor], *, seed: int
) -> None:
    """Save whole weights of a model that is not wrapped, its config and tokenizer; one process
    calls this. The model's own weights are not looked at, so it may be trained meanwhile."""
    adapter = hasattr(model, "peft_config")
    tied = getattr(model, "all_tied_weights_keys", {})  # one tensor, which is saved once
    weights |= {name: weights[of] for name, of in tied.items() if {name, of} <= weights.keys()}
    # TRL keeps the adapter as it was beside the trained one, as "ref".
    alone = {"save_embedding_layers": False, "selected_adapters": ["default"]}
    model.save_pretrained(folder, state_dict=weights, **(alone if adapter else {}))
    tokenizer.save_pretrained(folder)
    if adapter:
        base = model.get_base_model()
        write_config(base.config, folder)
        warns = mark_adapter(folder, base.config, base.name_or_path)
        place = str(folder.resolve())
        text = how_to_load(base.config, base.name_or_path, place, seed, warns=warns)
        (folder / "README.md").write_text(f"# Adapter\n\n{text}", encoding="utf-8")
    else:
        add_older_rope_names(folder)
