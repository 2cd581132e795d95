"""Where the checkpoints of an output are, and which folders are some: by number, not by letter."""

import re
from dataclasses import dataclass
from pathlib import Path

ASIDE = (".damaged", ".incomplete")
"""What is put behind the name of a folder that no longer is a checkpoint."""
FLIGHT = "flight"
"""The folder with a record of each rank, if the job has hung."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the name of a checkpoint; nobody has looked into it yet."""

    step: int
    path: Path


@dataclass(frozen=True)
class Series:
    """The checkpoints of one output: folders `PREFIXn` side by side in `folder`.

    `step_1000000` comes after `step_999999`. Files, links and other names, such as `step_best`, are
    the user's.
    """

    folder: Path
    prefix: str
    digits: int = 1
    """The least digits of a name, filled with zeros."""

    def path_of(self, step: int) -> Path:
        return self.folder / f"{self.prefix}{step:0{self.digits}d}"

    def found(self) -> list[Checkpoint]:
        """The folders with names that this series gives, the oldest first."""
        name = re.compile(re.escape(self.prefix) + r"([0-9]+)")
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        given = ((path, name.fullmatch(path.name)) for path in paths)
        steps = [(int(match[1]), path) for path, match in given if match]
        return [
            Checkpoint(step, path)
            for step, path in sorted(steps)
            if path == self.path_of(step) and path.is_dir() and not path.is_symlink()
        ]

    def aside(self) -> list[Path]:
        """Folders that were given another name since no run can go on from them."""
        if not self.folder.is_dir():
            return []
        name = re.compile(
            re.escape(self.prefix) + "[0-9]+(" + "|".join(map(re.escape, ASIDE)) + ")"
        )
        return sorted(path for path in self.folder.iterdir() if name.fullmatch(path.name))


def steps_of(output: str | Path) -> Series:
    """The checkpoints of the fine-tuning recipe."""
    return Series(Path(output) / "checkpoints", "step_", digits=6)


def trainer_checkpoints_of(output: str | Path) -> Series:
    """The checkpoints of transformers' trainers."""
    return Series(Path(output), "checkpoint-")
