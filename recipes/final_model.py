"""`final/`: the trained model as plain libraries load it, its card, and that the run has ended."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longctx_patch.checkpoints.train_state import write_run
from longctx_patch.checkpoints.whole_files import replaced
from longctx_patch.recipes.exporting import export_model
from longctx_patch.recipes.model_card import ADAPTER_FILE, Card, ending, write_card
from longctx_patch.recipes.run_record import mark_ended


def write_final(
    accelerator: Any,
    model: Any,
    tokenizer: Any,
    output: Path,
    *,
    seed: int,
    step: int,
    config: Any,
    card: Callable[[], Card],
    run: Mapping[str, Any],
) -> None:
    """Write the model into `final/` of the output, in place of what is there, and mark the run as
    ended; every process calls this.

    Args:
        accelerator, model, tokenizer, seed, step: see `export_model`.
        config: of the model, as it was trained.
        card: makes what README.md of the model says; one process calls it.
        run: the run's fingerprint.

    Raises:
        ValueError: on all ranks, if a weight is not finite.
    """
    final = output / "final"
    with replaced(final) as beside:
        export_model(accelerator, model, tokenizer, beside, seed=seed, step=step)
        if accelerator.is_main_process:
            write_card(beside, card(), config, final)
            if (beside / ADAPTER_FILE).is_file():  # by which `longctx merge` knows its base
                write_run(beside, step, {"weights": run["weights"]})
    if accelerator.is_main_process:
        mark_ended(output, run)
        print(ending(final), flush=True)
