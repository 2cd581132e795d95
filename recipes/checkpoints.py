"""Checkpoints that a run resumes from exactly, and models that plain transformers and peft load.

`output/checkpoints/step_000010/` holds `model/` (loadable), `state/` (trained weights and
optimizer, by torch.distributed.checkpoint: any number of processes can read it), scheduler, random
states and `run.json`, which is written last and makes the checkpoint complete. Several machines
need one shared output folder.
"""

import contextlib
import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from .model_card import how_to_load, mark_adapter
from .row_order import RowOrder
from .settings import PARALLELISM, Settings

RUN_FILE = "run.json"
WRITERS = 4
"""Threads with which each process writes states: 2 GiB took 0.9 s with four, 3.7 s with one."""
# Settings that may differ between a run and its resumption without changing any number.
FREE = {
    *("text", "output", "resume", "save_every", "tokenizer", "text_field"),
    *("one_document_per_row", "pack"),  # the digest of the rows says whether they are the same
    *("ulysses_waves", "fused_layers"),  # these change rounding only
    *("skip_rehearsal", "push_to_hub", "hub_private", "load_sharded", "library_warnings"),
}
WORLD = {*PARALLELISM} - FREE
ROWS = {"batch_size", "gradient_accumulation_steps"}


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """What changes while training and has to be restored."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0
    """Optimizer steps done; with the row order this is also the position in the data."""


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


def check_output(settings: Settings) -> Path | None:
    """Refuse an output folder that holds files or, with `resume`, one without a checkpoint.

    Returns the checkpoint to go on from, None for a new run. Changes nothing.
    """
    output = Path(settings.output)
    if settings.resume:
        complete = sorted(output.glob(f"checkpoints/step_*/{RUN_FILE}"))
        if not complete:
            raise ValueError(
                f"resume: there is no complete checkpoint under {output / 'checkpoints'}. "
                "Start without --resume in an empty folder, with --save-every N."
            )
        return complete[-1].parent
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"output {str(output)!r} holds files. Give an empty or new folder, or go on with the "
            "run in it with --resume."
        )
    return None


def make_output(accelerator: Any, output: Path) -> None:
    """Make the folder; every process calls this. Raises ValueError on all where one sees another
    folder, as on a machine that doesn't share it: the first checkpoint would fail there."""
    marker = output / ".shared"
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        marker.touch()
    accelerator.wait_for_everyone()
    output.mkdir(parents=True, exist_ok=True)
    sees = torch.tensor([marker in output.iterdir()], dtype=torch.int, device=accelerator.device)
    blind = [rank for rank, seen in enumerate(accelerator.gather(sees).tolist()) if not seen]
    if accelerator.is_main_process:
        marker.unlink()
    if blind:
        raise ValueError(
            f"output {str(output)!r} is another folder for processes {blind} than for process 0: "
            "checkpoints need one that all machines share. Give --output on a shared disk."
        )


def check_fingerprint(checkpoint: Path, now: dict[str, Any]) -> None:
    """Refuse to resume where the numbers would differ from those of an uninterrupted run."""
    then = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))["fingerprint"]
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


def save_checkpoint(
    accelerator: Any, state: TrainState, tokenizer: Any, output: Path, run: dict[str, Any]
) -> None:
    """Write `output/checkpoints/step_N`; every process calls this."""
    folder = output / "checkpoints" / f"step_{state.step:06d}"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # left incomplete by a run that was stopped
        folder.mkdir(parents=True)
    accelerator.wait_for_everyone()
    export_model(accelerator, state.model, tokenizer, folder / "model", seed=run["exact"]["seed"])
    with _one_process_is_fine():
        writer = _Writer(folder / "state", thread_count=WRITERS)
        dcp.save(_tensors(state), storage_writer=writer, no_dist=not _distributed())
    random = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save(random, folder / f"random_{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(state.scheduler.state_dict(), folder / "scheduler.pt")
        content = json.dumps({"step": state.step, "fingerprint": run}, indent=2)
        (folder / RUN_FILE).write_text(content, encoding="utf-8")
    accelerator.wait_for_everyone()


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but errors of its threads are raised; else a full disk would go unnoticed."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        done = super().write_data(plan, planner)
        if len(done.value()) != len(plan.items):
            raise OSError(f"states could not be written to {self.path}: see the output above")
        return done


def load_checkpoint(accelerator: Any, state: TrainState, folder: Path) -> None:
    """Bring `state` to where `folder` was saved; every process calls this."""
    content = _tensors(state)
    with _one_process_is_fine():
        dcp.load(content, checkpoint_id=folder / "state", no_dist=not _distributed())
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(state.model, content["model"], options=options)
    set_optimizer_state_dict(
        state.model, _plain(state.optimizer), content["optimizer"], options=options
    )
    state.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    random = folder / f"random_{accelerator.process_index}.pt"
    if random.exists():
        states = torch.load(random, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if states["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])
    state.step = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["step"]


def export_model(accelerator: Any, model: Any, tokenizer: Any, folder: Path, *, seed: int) -> None:
    """Save the adapter or the model, its config and tokenizer; every process calls this.

    `seed` is the run's: an adapter's base model may have random weights that were made from it.
    """
    inner = accelerator.unwrap_model(model)
    adapter = hasattr(inner, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
    weights = get_model_state_dict(model, options=options)  # collective; only rank 0 gets them
    weights = _without_frozen(weights, model)
    if accelerator.is_main_process:
        # TRL keeps the adapter as it was beside the trained one, as "ref".
        alone = {"save_embedding_layers": False, "selected_adapters": ["default"]}
        extra = alone if adapter else {}
        inner.save_pretrained(folder, state_dict=weights, **extra)
        tokenizer.save_pretrained(folder)
        if adapter:
            base = inner.get_base_model()
            base.config.save_pretrained(folder)
            warns = mark_adapter(folder, base.config, base.name_or_path)
            place = str(folder.resolve())
            text = how_to_load(base.config, base.name_or_path, place, seed, warns=warns)
            (folder / "README.md").write_text(f"# Adapter\n\n{text}", encoding="utf-8")
    accelerator.wait_for_everyone()


def _tensors(state: TrainState) -> dict[str, Any]:
    options = StateDictOptions(ignore_frozen_params=True)
    optimizer = get_optimizer_state_dict(state.model, _plain(state.optimizer), options=options)
    weights = get_model_state_dict(state.model, options=options)
    return {"model": _without_frozen(weights, state.model), "optimizer": optimizer}


def _without_frozen(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Drop the scales that frozen quantised weights keep under their names."""
    parameters = model.named_parameters()
    frozen = tuple(f"{n.removeprefix('module.')}." for n, p in parameters if not p.requires_grad)
    return {name: value for name, value in weights.items() if not name.startswith(frozen)}


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silence torch's warning of a single process, which `no_dist` already announces."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
