"""Trained models as plain transformers and peft load them, an adapter or all weights, and `final/`:
such a model with its card, and that the run has ended."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedConfig

from longctx_patch.checkpoints.fingerprint import write_run
from longctx_patch.checkpoints.states import without_frozen
from longctx_patch.checkpoints.whole_files import replaced
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.recipes.model_card import (
    ADAPTER_FILE,
    Card,
    how_to_load,
    mark_adapter,
    write_card,
)
from longctx_patch.recipes.next_step import ending
from longctx_patch.recipes.run_record import mark_ended


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


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json, with RoPE under both of its names."""
    config.save_pretrained(folder)
    add_older_rope_names(folder)


def add_older_rope_names(folder: Path) -> None:
    """Give config.json RoPE also under the names that readers before transformers 5 know.

    Without them, such a reader would silently compute with its default RoPE.
    """
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    rope = content.get("rope_parameters") or {}
    if "rope_type" not in rope:
        return  # RoPE per kind of layer has no older name
    names = ("rope_theta", "partial_rotary_factor")
    content |= {name: rope[name] for name in names if name in rope}
    if rope["rope_type"] != "default":
        content["rope_scaling"] = {k: v for k, v in rope.items() if k not in names}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_final(
    trainer: Any,
    tokenizer: Any,
    output: Path,
    *,
    seed: int,
    config: Any,
    card: Callable[[], Card],
    run: Mapping[str, Any],
) -> None:
    """Write the trainer's model into `final/` of the output, in place of what is there, and mark
    the run as ended; every process calls this.

    Args:
        tokenizer, seed: see `export_model`.
        config: of the model, as it was trained.
        card: makes what README.md of the model says; one process calls it.
        run: the run's fingerprint.

    Raises:
        ValueError: on all ranks, if a weight is not finite.
    """
    final, accelerator, step = output / "final", trainer.accelerator, trainer.state.global_step
    with replaced(final) as beside:
        model = trainer.model_wrapped
        export_model(accelerator, model, tokenizer, beside, seed=seed, step=step)
        if accelerator.is_main_process:
            write_card(beside, card(), config, final)
            if (beside / ADAPTER_FILE).is_file():  # by which `longctx merge` knows its base
                write_run(beside, step, {"weights": run["weights"]})
    if accelerator.is_main_process:
        mark_ended(output, run)
        print(ending(final), flush=True)
