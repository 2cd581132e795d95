"""Runs beside a trainer's steps: the watchdog's marks, and the comparison of replicas."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from longctx_patch.health.agreement import (
    launch_settings,
    model_facts,
    require_agreement,
    versions,
)
from longctx_patch.health.pace import PaceCheck
from longctx_patch.health.replicas import ReplicaCheck
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.health.weights import check_weights
from longctx_patch.hf.sentinel import TOKENS, Sentinel
from longctx_patch.rules.together import of_all_ranks, refuse_together
from longctx_patch.trainer.log_entries import add_entry

SENTINEL_ERROR = "sentinel_error"
"""Key of an entry of the trainer's log: how far ranks that share a row and one alone are apart."""
SLOW_RANKS = "slow_ranks"
"""Key of an entry of the trainer's log: which ranks all others wait for, in words."""
OF_ONE_RANK = {
    *("local_rank", "output_dir", "logging_dir", "run_name", "disable_tqdm", "report_to"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_strategy", "project"),
}
"""Arguments of a trainer that change nothing of the training and may differ between ranks."""
OF_THE_MIXIN = (*("skip_bad_steps", "sentinel_every", "keep_every", "save_in_background"),)
"""Arguments beside the trainer's own, by which ranks wait for each other."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None))


if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class WatchedMixin(_Trainer):
    """Compares ranks before they train and while they do, and tells the watchdog of
    checkpoints."""

    _watchdog: Watchdog | None
    _pace: PaceCheck | None = None
    _say: Callable[[str], None]
    """Logs a line once for the job."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' training. Raises ValueError on all ranks where they would not train the
        same model on the same data in the same way."""
        self.require_agreement()
        self._pace = self._pace or PaceCheck(self.accelerator.device, self._say)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._pace = None  # a training that follows compares the ranks anew

    def require_agreement(self) -> None:
        """Raise ValueError on all ranks where they would not train alike. Collective."""
        require_same_training(self)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, while the time that batches take to come is counted."""
        counted = epoch_iterator if self._pace is None else self._pace.loading(epoch_iterator)
        return super().get_batch_samples(counted, *args, **kwargs)

    def note_slow_ranks(self) -> None:
        """Call it after each step, on every rank."""
        step = self.state.global_step
        if self._pace is not None and (slow := self._pace.after_step(step)):
            add_entry(self, {SLOW_RANKS: slow}, step)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.enter("save")  # until the callbacks that come with it are done
        super()._save_checkpoint(*args, **kwargs)


class HealthCallback(TrainerCallback):
    """Marks steps for the watchdog, if there is one, and compares ranks after each, and before
    anything is saved."""

    def __init__(self, trainer: WatchedMixin, watchdog: Watchdog | None) -> None:
        self._trainer, self._watchdog = trainer, watchdog
        self._replicas: ReplicaCheck | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check_weights(given["model"], args.device)
        self._replicas = ReplicaCheck(given["model"], state.global_step)

    def require_alike(self, step: int) -> None:
        """Raise ReplicasDivergedError on all ranks if replicas differ. Collective."""
        if self._replicas is not None:
            self._replicas.require_alike(step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.done(state.global_step)
        if self._replicas is not None:
            self._replicas.after_step(state.global_step)
        self._trainer.note_slow_ranks()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.enter("evaluate")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.enter("step")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.enter("step")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.require_alike(state.global_step)
        if self._watchdog is not None:
            self._watchdog.enter("end")


class SentinelCallback(TrainerCallback):
    """Computes the beginning of the first row of data over the ranks of its group and by each rank
    alone, every so many steps, before anything of the step is saved."""

    def __init__(self, trainer: Any, every: int) -> None:
        """Collective. Raises ValueError on all ranks where there is nothing to compare."""
        self._trainer, self._every = trainer, every
        ids = first_document(trainer.train_dataset)[:TOKENS]
        why_not = "the first row of train_dataset has no input_ids" if len(ids) < 2 else ""
        if trainer.long_context_handle.mask is not None:
            why_not = "the model was patched with a mask, which one rank alone does not see"
        refuse_together([f"sentinel_every={every}: {why_not}. Leave it out."] if why_not else [])
        self._ids = torch.tensor(of_all_ranks(ids)[0])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every == 0:
            trainer = self._trainer
            sentinel = Sentinel(trainer.long_context_handle, trainer.model_wrapped)
            add_entry(trainer, {SENTINEL_ERROR: sentinel.check(self._ids)}, state.global_step)


def first_document(rows: Any) -> list[int]:
    """The tokens of the first document of a dataset; none where its rows have no tokens."""
    row = next(iter(rows), None) if rows is not None else None
    if not isinstance(row, Mapping):
        return []
    answers = ("chosen_ids", "completion_ids")
    answer = next((list(row[name]) for name in answers if name in row), [])
    ids = list(row["input_ids"]) if "input_ids" in row else [*row.get("prompt_ids", []), *answer]
    lengths = row.get("seq_lengths", [len(ids)])
    return [int(token) for token in ids[: lengths[0]]]


def require_same_training(trainer: Any) -> None:
    """Raise ValueError on all ranks unless they train the same model on the same data in the same
    way. Collective; before anything is wrapped."""
    facts = {
        "arguments": plain_arguments(trainer.args),
        "arguments of the mixin": {name: getattr(trainer, f"_{name}") for name in OF_THE_MIXIN},
        "versions": versions(),
        **launch_settings(),
        "data": _data(trainer.train_dataset),
    }
    if trainer.model is not None:
        facts |= model_facts(trainer.model)
    require_agreement(facts, "how to train")


def plain_arguments(args: Any) -> Mapping[str, Any]:
    """A trainer's arguments that are plain values; objects are of this process."""
    values = args.to_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in OF_ONE_RANK and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _data(rows: Any) -> Mapping[str, Any]:
    """The number of rows and some of them. Data that is made as it is read may differ between
    replicas."""
    transform = getattr(rows, "format", None) or {}
    is_fixed = isinstance(rows, Sequence) or type(rows).__module__.startswith("datasets.")
    if not is_fixed or not hasattr(rows, "__len__") or transform.get("type") == "custom":
        return {"kind": type(rows).__name__}
    places = sorted({0, len(rows) // 2, len(rows) - 1}) if len(rows) else []
    return {"rows": len(rows)} | {f"row {place}": row_facts(rows[place]) for place in places}


def row_facts(row: Any) -> Any:
    """A row that looks the same in every process: pictures and arrays become a digest of their
    numbers; of objects that nothing is known of, only the kind is left.

    Example:
        >>> row_facts({"text": "a", "source": object()})
        {'text': 'a', 'source': 'object'}
    """
    if isinstance(row, _PLAIN):
        return row
    if isinstance(row, Mapping):
        return {name: row_facts(value) for name, value in row.items()}
    if isinstance(row, list | tuple):
        return [row_facts(value) for value in row]
    kind = type(row).__name__
    if isinstance(row, Tensor):
        flat = row.detach().cpu().contiguous().reshape(-1)
        return f"{kind} {list(row.shape)} {row.dtype} {_digest(flat.view(torch.uint8).numpy())}"
    if not hasattr(row, "__array_interface__"):  # arrays have it, and pictures of PIL
        return kind
    numbers = np.ascontiguousarray(row)
    return kind if numbers.dtype.hasobject else f"{kind} {numbers.shape} {_digest(numbers)}"


def _digest(numbers: np.ndarray) -> str:
    return blake2b(numbers.tobytes(), digest_size=8).hexdigest()
