"""The folder that a run writes: whether a run may begin or go on in it, and who shares it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from longctx_patch.rules.names import require_choice
from longctx_patch.rules.together import own_rank, refuse_together

from .lock import LOCK_FILE
from .manifest import MANIFEST
from .series import FLIGHT, Series, is_ours, newest_good
from .whole_files import name_problem

ResumeName = Literal["no", "yes", "auto"]
OWN_FILES = {LOCK_FILE, ".shared", FLIGHT}
"""What a run leaves where it ends before it has written anything else."""
STATE_FILES = "run.json", "trainer_state.json"
"""By which a checkpoint without a manifest is known: ours, and those of transformers' trainers."""


def resume_name(given: object) -> ResumeName:
    """The name for what a flag, or a yes or no in YAML, says. Raises ValueError for other words."""
    name: Any = {True: "yes", False: "no"}[given] if isinstance(given, bool) else given
    require_choice("resume", name, get_args(ResumeName))
    return cast(ResumeName, name)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Says where a run writes, and how it is asked to begin there."""

    folder: Path
    checkpoints: Series
    resume: ResumeName
    record: str
    """The file that every run writes as it begins: a folder with it is a run's."""

    def check(self) -> None:
        """Raise ValueError for a folder that the run can't begin or go on in. Changes nothing."""
        if problem := name_problem(self.folder, "--output"):
            raise ValueError(problem)
        if (hidden := _no_folder(self.folder)) is not None:
            raise ValueError(f"output {str(self.folder)!r}: {hidden}")
        if self.resume != "no":
            self._refuse_older()
        if self.resume == "yes":
            if not self.checkpoints.complete():
                raise ValueError(
                    f"resume: there is no complete checkpoint under {self.checkpoints.folder}. "
                    "Start without --resume in an empty folder, or with --resume auto, which "
                    "starts or goes on as it finds."
                )
            return
        is_own_run = self.resume == "auto" and (self.folder / self.record).is_file()
        if self.folder.exists() and not (self.is_free() or is_own_run):
            if self.resume == "auto" and (found := self.checkpoints.complete()):
                raise ValueError(
                    f"output {str(self.folder)!r} has checkpoints of a run, the newest "
                    f"{found[-1].path.relative_to(self.folder)}, but {self.record} is missing, by "
                    "which --resume auto knows a run. Go on from the newest whole one with "
                    "--resume, which writes that file anew, or give an empty or new folder."
                )
            give = "Give an empty or new folder (--output-dir FOLDER)"
            hint = (
                f"no run of this recipe has begun there. {give}."
                if self.resume == "auto"
                else f"{give}, or go on with the run in it with --resume."
            )
            raise ValueError(f"output {str(self.folder)!r} holds files. {hint}")

    def _refuse_older(self) -> None:
        """Raise ValueError where checkpoints of older versions are all there is: a run that starts
        anew would train their steps again."""
        old = [
            (each.path, f"without {MANIFEST}, of an older version or another trainer")
            for each in self.checkpoints.found()
            if not is_ours(each.path) and any((each.path / name).is_file() for name in STATE_FILES)
        ]
        steps = sorted((self.folder / "checkpoints").glob("step_*/run.json"))
        old += [(file.parent, "in the format of an older version") for file in steps]
        has_ended = self.resume == "auto" and (self.folder / "final").is_dir()
        if old and not has_ended and not self.checkpoints.complete():
            path, what = old[-1]
            raise ValueError(
                f"resume: {path} is a checkpoint {what}. This version can't check it, so it does "
                "not go on from it, and does not train its steps again beside it. Go on with the "
                "version that wrote it, or give a new output."
            )

    def is_free(self) -> bool:
        """Says whether it is a folder without a file of anybody's."""
        ours = OWN_FILES | {f"{self.record}.tmp"}  # which a full disk leaves
        return self.folder.is_dir() and all(path.name in ours for path in self.folder.iterdir())

    def find(self, say: Callable[[str], object]) -> Path | None:
        """The checkpoint to go on from, None to begin. Collective; raises where `check` does, and
        where no checkpoint is whole."""
        problems = []
        if own_rank() == 0:
            try:
                self.check()
            except ValueError as error:
                problems = [str(error)]
        refuse_together(problems)
        found = None if self.resume == "no" else newest_good(self.checkpoints, say)
        if self.resume == "auto":
            say(
                f"resume: going on from {found}"
                if found
                else "resume: starting from the first step"
            )
        return found


def _no_folder(place: Path) -> str | None:
    """Says why nothing can be written into a folder at `place`, None if it can."""
    path = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not path.exists():
        return (
            f"{path} is a link to {path.readlink()}, which is not there. Make that folder, bring "
            "its disk back, or give another output."
        )
    if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return None
    why = "takes no files of this user" if path.is_dir() else "is a file"
    return f"{path} {why}. Give another output."


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
