"""What of a trainer's checkpoint is written while the training goes on: weights and the states of
the optimizer, from copies on the host. All else is small, and is written before.

transformers and callbacks write, read and upload a checkpoint in one go. So training waits as
before where somebody may look for files that come later: `reasons_to_wait` has the list.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from accelerate.utils.constants import OPTIMIZER_NAME as FSDP_OPTIMIZER_NAME
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from longctx_patch.checkpoints.background import BesideTraining, bytes_here
from longctx_patch.checkpoints.states import write_states
from longctx_patch.health.progress import TimeLimits
from longctx_patch.health.watchdog import Watchdog

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

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


class LateWritesMixin(_Trainer):
    """The overrides that hold back what is written late."""

    _beside: BesideTraining | None = None
    """Writes while the training goes on; None where it waits."""
    _copies: dict[str, Any] | None = None
    """What the checkpoint that is being saved has on the host; None where it is written at once."""
    _late: list[Write]
    """What is left to write of it."""

    def _copy_states(self) -> None:
        """Copy what is written late, if a host has room and nobody looks for it before.
        Collective."""
        self._late, self._copies = [], None
        if self._beside is None:
            return
        if (why := next(reasons_to_wait(self), None)) is not None:
            return self._beside.say_once(why)
        states = _states_of(self)
        # safetensors makes a whole file in memory before it writes it.
        self._copies = self._beside.copied(states, bytes_here(states.get("weights")))

    def _settle_saving(self) -> None:
        """Wait until the last checkpoint is whole. Raises the error if it can't be."""
        if self._beside is not None:
            self._beside.settle()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._copies is None or "weights" not in self._copies:
            return super()._save(output_dir, state_dict)
        with _model_held_back(self.model, self._copies["weights"], self._late):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Under the names and in the form in which transformers reads them."""
        if self._copies is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        copies, folder = self._copies, Path(output_dir)
        if self.is_fsdp_enabled:
            for kind, name in (("model", FSDP_MODEL_NAME), ("optimizer", FSDP_OPTIMIZER_NAME)):
                states, place = {kind: copies[kind]}, folder / f"{name}_0"
                self._late.append(partial(write_states, states, place))
        elif self.args.should_save:
            self._late.append(lambda _: torch.save(copies["optimizer"], folder / OPTIMIZER_NAME))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def beside_training(
    device_type: str, watchdog: Watchdog | None, say: Callable[[str], object]
) -> BesideTraining:
    """What writes a trainer's checkpoints. Collective."""
    given: dict[str, Any] = {"device_type": device_type, "say": say}
    if watchdog is None:
        return BesideTraining(timeout_s=TimeLimits().save_s, **given)
    given |= {"waiting": watchdog.saving, "beside": watchdog.beside}
    return BesideTraining(timeout_s=watchdog.limits.save_s, **given)


def _states_of(trainer: Any) -> dict[str, Any]:
    """What this rank will write late, sharing the tensors with the training."""
    with_optimizer = not trainer.args.save_only_model
    if trainer.is_fsdp_enabled:
        return _sharded_states(trainer.model, trainer.optimizer) if with_optimizer else {}
    states = {}
    if trainer.args.should_save:
        if _is_whole(trainer.model):
            states["weights"] = trainer.model.state_dict()
        if with_optimizer:
            states["optimizer"] = trainer.optimizer.state_dict()
    return states


def _sharded_states(model: Any, optimizer: Any) -> dict[str, Any]:
    """As `save_fsdp_model` and `save_fsdp_optimizer` of Accelerate take them."""
    options = StateDictOptions()
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    else:
        weights = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": states}


def _is_whole(model: Any) -> bool:
    """Whether `save_pretrained` writes what it is given, without a look at the model's weights. Of
    an adapter it writes little, and switches its config while it does: nobody may train then."""
    is_plain = isinstance(model, PreTrainedModel) and not hasattr(model, "hf_device_map")
    others = ("hf_quantizer", "_hf_peft_config_loaded")
    return is_plain and not any(getattr(model, name, None) for name in others)


@contextmanager
def _model_held_back(model: Any, weights: dict[str, Any], late: list[Write]) -> Iterator[None]:
    """Within it, `model.save_pretrained` is put off, and then takes `weights`."""

    def held(*args: Any, **kwargs: Any) -> None:
        given = kwargs | {"state_dict": weights}
        late.append(lambda _: model.save_pretrained(*args, **given))

    model.save_pretrained = held  # hides the method of its class
    try:
        yield
    finally:
        del model.save_pretrained


def reasons_to_wait(trainer: Any) -> Iterator[str]:
    """Why a trainer's checkpoints are written while training waits, in words."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    kind = str(getattr(plugin.state_dict_type, "name", "")) if plugin is not None else ""
    if plugin is not None and kind != "SHARDED_STATE_DICT":
        yield (
            f"fsdp_state_dict_type={kind} has rank 0 gather and write everything. Use "
            "SHARDED_STATE_DICT"
        )
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
    """Whether a callback may look into the checkpoint that was just saved."""
    method = type(callback).on_save
    package, _, room = method.__module__.partition(".")
    if package == "longctx_patch" or (package, room) == ("transformers", "trainer_callback"):
        return False
    variable = TRACKERS.get(method.__qualname__.partition(".")[0])
    if package != "transformers" or variable is None:
        return True
    return os.environ.get(variable, "").lower() not in READS_NONE
