"""A trainer's checkpoints: sealed when everything of them is written, and checked before a run goes
on from one.

`checkpoint-N` gets its manifest (`longctx_patch.checkpoints`) after transformers, TRL, the
callbacks and a thread beside the training have written into it; older ones are deleted, and new
ones uploaded, only then.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from transformers.trainer import TRAINER_STATE_NAME

from longctx_patch.checkpoints.manifest import MANIFEST, MISSING, begin, seal
from longctx_patch.checkpoints.plain_pickle import not_plain
from longctx_patch.checkpoints.series import (
    Retention,
    checkpoints_of,
    delete,
    delete_old,
    first_of,
    keep_others,
    newest_good,
    problems_in,
)
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.rules.together import of_all_ranks, own_rank, refuse_together
from longctx_patch.trainer.record import promises_manifest
from longctx_patch.trainer.saved_states import SavedStatesMixin, Write, beside_training

logger = logging.getLogger(__name__)


class SealedCheckpointsMixin(SavedStatesMixin):
    """The overrides that seal checkpoints, and check the one that a run goes on from."""

    _watchdog: Watchdog | None
    _save_in_background = False
    """Whether training goes on while a checkpoint is written."""
    _keep_every: int = 0
    """Checkpoints whose step is a multiple of this are kept for ever; 0: none."""
    _saving: Path | None = None
    """The checkpoint that is being written, and will be sealed."""
    _has_begun = False
    """Whether its folder is marked."""
    _callbacks_follow = False
    """Whether callbacks will still write into it."""
    _upload_waits = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The trainer's `train`. Raises ValueError on all ranks for a checkpoint with a file that
        is damaged or missing; True takes the newest whole one."""
        folder = self._whole(resume_from_checkpoint)
        if self.args.save_on_each_node:  # one folder for each machine, of which no rank sees all
            self._say("save_on_each_node=True: checkpoints get no manifest, and are not checked")
        elif self._save_in_background and self._beside is None:
            self._beside = beside_training(self.args.device.type, self._watchdog, self._say)
        with self._beside or nullcontext():
            return super().train(folder, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers makes one step before it looks whether the run is over: one too many for a
        run that goes on from its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # ---- Saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.save_on_each_node:
            return super()._save_checkpoint(model, trial)
        self._settle_saving()
        series = checkpoints_of(self._get_output_dir(trial))
        self._saving, self._has_begun = series.path_of(self.state.global_step), False
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            self._saving = None
            self._forget_states()
            raise
        finally:
            self.args.save_total_limit = limit
        if not self._callbacks_follow:  # whoever asked for it gets a whole one
            self._seal()
            self._settle_saving()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._saving is not None and not self._has_begun:
            if own_rank() == 0:
                keep_others(self._saving, self._say)
                begin(self._saving)
            of_all_ranks(None)  # nobody writes into what is the user's
            self._has_begun = True
            self._take_states()
        if self._saving is None or not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:  # transformers would gather all weights, or write none
            self._save(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._upload_waits = self._saving is not None
        if not self._upload_waits:
            super()._push_from_checkpoint(checkpoint_folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._beside is not None:  # after each step
            self._beside.look()
        self._callbacks_follow = True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except BaseException:
            self._saving = None
            self._forget_states()
            raise
        finally:
            self._callbacks_follow = False
        if self._saving is not None:
            self._seal()

    def _seal(self) -> None:
        folder, self._saving = self._saving, None
        assert folder is not None
        late, is_late = self._late, self._is_late
        self._forget_states()
        if is_late and self._beside is not None:
            return self._beside.start(folder.name, partial(self._complete, folder, late))
        if self._watchdog is not None:
            self._watchdog.enter("save")
        self._complete(folder)
        if self._upload_waits:
            super()._push_from_checkpoint(str(folder))
        if self._watchdog is not None:
            self._watchdog.enter("step")

    def _complete(
        self, folder: Path, late: Sequence[Write] = (), group: ProcessGroup | None = None
    ) -> None:
        """Write what is left of a checkpoint, and seal it. Collective. `group`: of the thread."""
        for write in late:
            write(group)
        seal(folder, group)
        if own_rank() == 0:
            self._delete_old(folder)

    def _delete_old(self, saved: Path) -> None:
        """As transformers does it: the best one is one of those that are kept, and what has just
        been saved, also by a run that went on from an older one than the newest."""
        if not (limit := self.args.save_total_limit or 0) > 0:
            return
        series, best = checkpoints_of(saved.parent), self.state.best_model_checkpoint
        spared = {saved, Path(best)} if best else {saved}
        newest = {each.path for each in series.found()[-limit:]}
        others = limit - len(spared - newest)
        kept = Retention(keep_last=max(1, others), keep_every=self._keep_every)
        delete_old(series, kept, spared=spared)

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        """transformers' end, which keeps the best checkpoint alone where one is to be kept. It
        would delete all folders whose names begin like a checkpoint's: here only checkpoints go,
        and those of `keep_every` stay."""
        self._settle_saving()  # it may be the best
        limit = self.args.save_total_limit
        if limit != 1 or self.args.save_on_each_node:
            return super()._finalize_training(trial, *args)
        self.args.save_total_limit = None
        try:
            output = super()._finalize_training(trial, *args)
        finally:
            self.args.save_total_limit = limit
        if own_rank() == 0 and (best := self.state.best_model_checkpoint) is not None:
            series = checkpoints_of(self._get_output_dir(trial))
            every, spared = self._keep_every, Path(best).resolve()
            others = [each for each in series.complete() if each.path.resolve() != spared]
            delete(series, [each.path for each in others if not (every and each.step % every == 0)])
        return output

    # ---- Going on ----

    def _whole(self, asked: Any) -> str | None:
        """The checkpoint to go on from, of which every file is as it was written."""
        asked = asked or None
        names = of_all_ranks(Path(asked).name if isinstance(asked, (str, Path)) else asked)
        if len(set(names)) > 1:
            raise ValueError(
                f"resume_from_checkpoint is {names} on ranks 0 to {len(names) - 1}: all of them go "
                "on from the same checkpoint, or none."
            )
        if asked is None:
            return None
        if asked is True:
            found = self._newest()
        else:
            found = Path(asked)
            if problems := _problems(found):
                raise ValueError(_refusal(found, problems))
        refuse_together(_problems_of_states(found) if own_rank() == 0 else ())
        if not of_all_ranks((found / MANIFEST).is_file())[0]:
            text = "has no manifest, as those of other trainers and older versions: files are taken"
            self._say(f"{found} {text} as they are")
        return str(found)

    def _newest(self) -> Path:
        output = self.args.output_dir
        found = newest_good(checkpoints_of(output), self._say, problems=_problems)
        if found is None:
            raise ValueError(
                f"resume_from_checkpoint=True: there is no complete checkpoint under {output}. "
                "Leave it out to start, or give the folder of one."
            )
        self._say(f"resume_from_checkpoint=True: going on from {found}")
        return found

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """transformers' state. Raises ValueError where more steps are done than asked for."""
        place = super()._init_training_state(max_steps, *args)
        if (done := self.state.global_step) > max_steps:
            raise ValueError(
                f"resume_from_checkpoint: the checkpoint has {done} steps, and the run is to have "
                f"{max_steps}: no step can be taken back. Ask for {done} or more, or start anew."
            )
        return place

    def _say(self, text: str) -> None:
        if self.is_world_process_zero():
            logger.warning("%s", text)

    def _load_best_model(self) -> None:
        """transformers would take damaged weights, and of a missing checkpoint only warn. Raises
        ValueError on all ranks for one that is not whole."""
        if (named := self.state.best_model_checkpoint) is not None:
            best = Path(self.args.output_dir) / Path(named).name  # the folder may have been moved
            best = best if best.is_dir() else Path(named)
            refuse_together(
                f"{best}, the best checkpoint, can't become the model: {problem}. To take the last "
                "step in its place, go on from the newest one with load_best_model_at_end=False "
                "(recipes: --resume --load_best_model_at_end false --allow-change "
                "load_best_model_at_end)."
                for problem in _problems(best)
            )
            self.state.best_model_checkpoint = str(best)
        super()._load_best_model()


def kept_problems(args: Any, keep_every: int) -> Iterator[str]:
    """Says why `keep_every` keeps no checkpoints, in words. `args`: the trainer's arguments."""
    if keep_every < 0:
        yield f"keep_every={keep_every}: a number of steps, 0 or more."
    if keep_every <= 0:
        return
    if not args.save_total_limit or args.save_on_each_node:
        why = "without save_total_limit" if not args.save_on_each_node else "with save_on_each_node"
        yield (
            f"keep_every={keep_every} {why}: no checkpoint is deleted by this package then. Give "
            "save_total_limit, or leave keep_every out."
        )
    strategy, steps = str(getattr(args.save_strategy, "value", args.save_strategy)), args.save_steps
    if strategy != "steps" or keep_every % steps:
        yield (
            f"keep_every={keep_every} with save_strategy={strategy!r} and save_steps={steps:g}: "
            "its checkpoints would not all be there. Give save_strategy='steps' and a multiple of "
            "save_steps."
        )


def _problems(folder: Path) -> list[str]:
    """Says what is wrong with a checkpoint of ours, or with one that was never to have a manifest:
    the latter has no checksums, but has to be written to its end. Collective."""
    if of_all_ranks((folder / MANIFEST).is_file())[0]:
        return problems_in(folder)
    return of_all_ranks(_problems_without_manifest(folder) if own_rank() == 0 else [])[0]


def _problems_without_manifest(folder: Path) -> list[str]:
    if not folder.is_dir():
        return ["the folder is missing"]
    if promises_manifest(folder) or not (folder / TRAINER_STATE_NAME).is_file():
        return [MISSING]
    return not_plain(folder)


def _problems_of_states(folder: Path) -> list[str]:
    """transformers would go on with a new optimizer and schedule, without a word."""
    if any(path.name.startswith("optimizer") for path in folder.iterdir()):
        return []
    return [
        f"resume_from_checkpoint: {folder} has weights alone (save_only_model=True), without the "
        "optimizer's states that a run goes on with. Go on from one that has them, or load its "
        f"weights into a run of its own: from_pretrained({str(folder)!r})."
    ]


def _refusal(folder: Path, problems: list[str]) -> str:
    """Says why no run goes on from a checkpoint, and from which one it can. Collective."""
    beside = of_all_ranks(checkpoints_of(folder.parent).found())[0]
    others = (each.path for each in reversed(beside) if each.path.name != folder.name)
    whole = next((path for path in others if not _problems(path)), None)
    advice = (
        "No other one beside it is whole: get it back from a copy, or start anew."
        if whole is None
        else f"The newest whole one is {whole}: train(resume_from_checkpoint={str(whole)!r})."
    )
    return f"resume_from_checkpoint: {folder} is not whole: {first_of(problems)}. {advice}"
