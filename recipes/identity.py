"""What makes a run one run: a resumed one must have the same, or say what it changes."""

import dataclasses
from pathlib import Path
from typing import Any

from longctx_patch.health.agreement import versions
from longctx_patch.recipes.row_order import RowOrder
from longctx_patch.recipes.saving.reading import fingerprint_of
from longctx_patch.recipes.settings import PARALLELISM, Settings

# Settings that may differ between a run and its resumption without changing any number.
FREE = {
    *("text", "output", "resume", "save_every", "keep_last", "keep_every"),
    *("tokenizer", "text_field"),
    *("one_document_per_row", "pack"),  # the digest of the rows says whether they are the same
    *("ulysses_waves", "fused_layers"),  # these change rounding only
    *("skip_rehearsal", "push_to_hub", "hub_private", "load_sharded", "library_warnings"),
    *("start_timeout", "step_timeout", "save_timeout"),
    *("skip_bad_steps", "max_loss_spike", "sentinel_every"),  # good steps are what they are
}
PLACES = {"model", "tokenizer", "text", "data", "eval_data", "output"}
WORLD = {*PARALLELISM} - FREE
ROWS = {"batch_size", "gradient_accumulation_steps"}


def fingerprint(settings: Settings, order: RowOrder, digest: str, processes: int) -> dict[str, Any]:
    """What a resumed run must share with the run that it continues (`exact`), and that run's world:
    its processes and how they share rows. `digest`: of the rows."""
    values = dataclasses.asdict(settings)
    return {
        "exact": {
            **{key: values[key] for key in values if key not in FREE | WORLD | ROWS},
            "rows_per_step": order.rows_per_step,
            "rows": digest,
        },
        "world": {"processes": processes, **{key: values[key] for key in sorted(WORLD | ROWS)}},
    }


def check_fingerprint(checkpoint: Path, now: dict[str, Any]) -> None:
    """Refuse to resume where the numbers would differ from those of an uninterrupted run."""
    then = fingerprint_of(checkpoint)
    free = {"max_steps"} if now["exact"]["scheduler"].startswith("constant") else set()
    # If the version that began the run had no such setting, it ran with the default.
    had = {field.name: field.default for field in dataclasses.fields(Settings)} | then["exact"]
    for key, value in now["exact"].items():
        before = had.get(key)
        if before != value and key not in free:
            raise ValueError(
                f"resume: {key} is {value!r}, the run at {checkpoint} has {before!r}, so the "
                "numbers would not be those of one run. Use the old value, or start a new run."
            )
    # Only settings that both versions count as the world are compared.
    both = sorted(then["world"].keys() & now["world"].keys())
    was, is_now = ({key: run["world"][key] for key in both} for run in (then, now))
    if now["exact"]["lora_dropout"] > 0 and was != is_now:
        raise ValueError(
            f"resume: the world was {was} and is {is_now}. With lora_dropout="
            f"{now['exact']['lora_dropout']} each process has random numbers of its own, which "
            "another number of processes can't continue. Use the old world, or start a new run."
        )


def facts_of(settings: Any) -> dict[str, Any]:
    """What all ranks must be given alike, with the versions that they run. Where things lie may
    differ between machines; what lies there is compared later."""
    values = dataclasses.asdict(settings)
    kept = {name: value for name, value in values.items() if name not in PLACES}
    return {"settings": kept, "versions": versions()}
