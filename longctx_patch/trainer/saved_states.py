"""Writes the large parts of a trainer's checkpoint: weights and the optimizer's states by name, in
one format for DDP, FSDP2 and any number of processes, and weights as `from_pretrained` loads them.

Both may be written while the training goes on, from copies on the host; all else is small, and is
written before. transformers and callbacks write, read and upload a checkpoint in one go, so
training waits where somebody may look for files that come later: `reasons_to_wait` has the list.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME

from longctx_patch.checkpoints.background import BesideTraining, whole_bytes
from longctx_patch.checkpoints.states import (
    load_tensors,
    load_weights,
    read_whole_weights,
    tensors_of,
    weights_of,
    write_states,
)
from longctx_patch.health.progress import TimeLimits
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.handle import hold_shards_alone

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

STATES = "optimizer_state"
"""The folder with weights and states. By its name transformers knows that there are some, and fails
where it finds none of its own files, rather than begin with a new optimizer."""
WRITES = {"_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler"}
"""A trainer's methods by which a checkpoint is written."""
KNOWN = ("longctx_patch", "transformers", "trl")
"""Packages whose overrides of them are known not to read what was written."""
TRACKERS = {
    "WandbCallback": "WANDB_LOG_MODEL",
    "MLflowCallback": "HF_MLFLOW_LOG_ARTIFACTS",
    "TrackioCallback": "",
    "SwanLabCallback": "",
}
"""transformers' trackers that read a checkpoint only if an environment variable asks for it."""
READS_NONE = {"", "0", "false", "no", "off", "end"}

Write = Callable[[ProcessGroup | None], object]


class SavedStatesMixin(_Trainer):
    """The overrides that write and load weights and states."""

    _beside: BesideTraining | None = None
    """Writes while the training goes on; None where it waits."""
    _tensors: dict[str, Any] | None = None
    """What the checkpoint that is being saved gets; None where none of ours is."""
    _is_late = False
    """Whether it is written from copies, while the training goes on."""
    _late: list[Write]
    """What is left to write of it."""

    def _take_states(self) -> None:
        """Take what a checkpoint gets, as copies if a host has room and nobody looks for it before.
        Collective."""
        hold_shards_alone(self.model)  # an evaluation may have come before
        self._late, self._is_late, frozen = [], False, _has_frozen(self.model)
        if self.args.save_only_model:
            whole = self.is_fsdp_enabled
            weights = weights_of(self.model, frozen=frozen, whole=whole)
            self._tensors = {"model": weights if self.args.should_save else {}}
        else:
            self._tensors = tensors_of(self.model, self.optimizer, frozen=frozen)
        if self._beside is None:
            return
        if (why := next(reasons_to_wait(self), None)) is not None:
            return self._beside.say_once(why)
        weights = self._tensors["model"] if self.args.should_save else {}
        copies = self._beside.copied(self._tensors, whole_bytes(weights))
        if copies is not None:
            self._tensors, self._is_late = copies, True

    def _forget_states(self) -> None:
        self._tensors, self._is_late, self._late = None, False, []

    def _settle_saving(self) -> None:
        """Wait until the last checkpoint is whole. Raises the error if it can't be."""
        if self._beside is not None:
            self._beside.settle()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """transformers' files. Where transformers would gather the weights, or training goes on,
        they follow when the states are written."""
        follows = self.is_fsdp_enabled or (self._is_late and _is_whole(self.model))
        if self._tensors is None or output_dir is None or not follows:
            return super()._save(output_dir, state_dict)
        with _model_held_back(self.model, partial(self._put_off, Path(output_dir) / STATES)):
            super()._save(output_dir, state_dict)
        if self.args.save_only_model and not self._is_late:
            self._write_now()

    def _put_off(self, states: Path, save: Callable[..., object]) -> None:
        """Write the weights as `from_pretrained` loads them, later."""
        assert self._tensors is not None
        weights, alone = self._tensors["model"], self.args.save_only_model
        tied = getattr(self.model, "all_tied_weights_keys", {})

        def write(_: ProcessGroup | None) -> None:
            save(state_dict=weights if alone else read_whole_weights(weights, states, tied))

        self._late.append(write)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._tensors is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        folder = Path(output_dir)
        self._late.insert(0, partial(write_states, self._tensors, folder / STATES))
        if not self._is_late:
            self._write_now()
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _write_now(self) -> None:
        late, self._late = self._late, []
        for write in late:
            write(None)

    # ---- Going on ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """transformers' files; ours are loaded with the optimizer's states."""
        if not has_states(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_states(checkpoint):
            return super()._load_optimizer_and_scheduler(checkpoint)
        states, frozen = Path(checkpoint) / STATES, _has_frozen(self.model)
        load_tensors(self.model, self.optimizer, states, frozen=frozen)
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not has_states(best):
            return super()._load_best_model()
        load_weights(self.model, Path(best) / STATES, frozen=_has_frozen(self.model))


def has_states(checkpoint: str | Path) -> bool:
    """Says whether a checkpoint has weights and states in our format; else it is transformers'."""
    return (Path(checkpoint) / STATES).is_dir()


def beside_training(
    device_type: str, watchdog: Watchdog | None, say: Callable[[str], object]
) -> BesideTraining:
    """Returns what writes a trainer's checkpoints. Collective."""
    given: dict[str, Any] = {"device_type": device_type, "say": say}
    if watchdog is None:
        return BesideTraining(timeout_s=TimeLimits().save_s, **given)
    given |= {"waiting": watchdog.saving, "beside": watchdog.beside}
    return BesideTraining(timeout_s=watchdog.limits.save_s, **given)


def _has_frozen(model: Any) -> bool:
    """Says whether a checkpoint has frozen weights as well: of an adapter's base it has none."""
    return not hasattr(model, "peft_config")


def _is_whole(model: Any) -> bool:
    """Says whether `save_pretrained` writes what it is given, without a look at the model's
    weights. Of an adapter it writes little, and switches its config while it does: nobody may train
    then."""
    is_plain = isinstance(model, PreTrainedModel) and not hasattr(model, "hf_device_map")
    others = ("hf_quantizer", "_hf_peft_config_loaded")
    return is_plain and not any(getattr(model, name, None) for name in others)


@contextmanager
def _model_held_back(
    model: Any, put_off: Callable[[Callable[..., object]], None]
) -> Iterator[None]:
    """Within it, `model.save_pretrained` is put off: `put_off` gets it with its arguments."""

    def held(*args: Any, **kwargs: Any) -> None:
        given = {name: value for name, value in kwargs.items() if name != "state_dict"}
        if hasattr(model, "peft_config"):  # the one that is trained
            given |= {"save_embedding_layers": False, "selected_adapters": model.active_adapters}
        put_off(partial(type(model).save_pretrained, model, *args, **given))

    model.save_pretrained = held  # hides the method of its class
    try:
        yield
    finally:
        del model.save_pretrained


def reasons_to_wait(trainer: Any) -> Iterator[str]:
    """Says why a trainer's checkpoints are written while training waits, in words."""
    strategy = getattr(trainer.args.hub_strategy, "value", trainer.args.hub_strategy)
    if trainer.args.push_to_hub and strategy != "end":
        yield f"hub_strategy={strategy!r} uploads each. Use 'end'"
    for callback in trainer.callback_handler.callbacks:
        if _may_read(callback):
            yield f"{type(callback).__name__}.on_save may read them"
    for kind_of in type(trainer).__mro__:
        own = sorted(WRITES & vars(kind_of).keys())
        if own and kind_of.__module__.partition(".")[0] not in KNOWN:
            yield f"{kind_of.__name__}.{own[0]} may read what it has written"


def _may_read(callback: Any) -> bool:
    """Says whether a callback may look into the checkpoint that was just saved."""
    method = type(callback).on_save
    package, _, room = method.__module__.partition(".")
    if package == "longctx_patch" or (package, room) == ("transformers", "trainer_callback"):
        return False
    variable = TRACKERS.get(method.__qualname__.partition(".")[0])
    if package != "transformers" or variable is None:
        return True
    return os.environ.get(variable, "").lower() not in READS_NONE
