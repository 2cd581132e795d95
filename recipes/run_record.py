"""Records a run in its output: the settings as they were used, and the error that ended it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from longctx_patch.checkpoints.whole_files import name_problem, write_whole
from longctx_patch.health.last_words import without_advice
from longctx_patch.recipes.yaml_file import read_yaml

RECORD_FILE, FAILURE_FILE = "settings.json", "failure.json"
PLAN_FILE = "plan.json"
"""What `longctx patch` has decided, with the command that starts the run."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
NO_MODEL = (
    "{} has no trained model yet: neither final/ nor a checkpoint with weights that can be loaded. "
    "Train it (`longctx train`), and with save_every if it is to be evaluated on the way."
)
SETTINGS_FILES = ("finetune.yaml", "sft.yaml", "dpo.yaml")
"""A folder with one of the recipes' settings files is a run folder."""


def settings_file_of(folder: str | Path) -> Path | None:
    """The recipe's settings in a run folder; None where `folder` is none."""
    files = (Path(folder) / name for name in SETTINGS_FILES)
    return next((file for file in files if file.is_file()), None)


def output_of(settings_file: Path) -> Path:
    """Where a run folder trains: as its settings file says, else in training/."""
    asked = read_yaml(settings_file)
    named = asked.get("output") or asked.get("output_dir") or settings_file.parent / "training"
    return Path(str(named))


def outputs_of(folder: Path) -> tuple[Path, ...]:
    """Returns where a run folder's trained models are, or those of an output; none for other
    folders.

    Raises ValueError where there is none yet.
    """
    settings = settings_file_of(folder)
    if settings is None and not (folder / RECORD_FILE).is_file():
        return ()
    training = folder / "training"
    outputs = (folder, output_of(settings) if settings else training, training)
    if not any(file for each in outputs for name in WEIGHT_FILES for file in each.rglob(name)):
        raise ValueError(NO_MODEL.format(folder))
    return outputs


def require_new(folder: Path, option: str = "--out") -> None:
    """Raise ValueError for a folder that holds files, or whose path not all files can have."""
    if problem := name_problem(folder, option):
        raise ValueError(problem)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{option} {str(folder)!r} holds files. Give a new or empty folder, so that nothing is "
            "overwritten."
        )


def say_ended(output: Path) -> None:
    """Print, once for a job, that there is nothing to go on with."""
    if os.environ.get("RANK", "0") == "0":
        print(f"resume: the run has ended, and {output}/final is there", flush=True)


def write_record(output: Path, settings: Mapping[str, Any], processes: int) -> None:
    """Write the file into a folder, which is made if it is missing; a resumed run replaces it."""
    output.mkdir(parents=True, exist_ok=True)
    _write(output, {"processes": processes, "settings": settings})
    (output / FAILURE_FILE).unlink(missing_ok=True)


@contextmanager
def noting_failure(output: Path) -> Iterator[None]:
    """Leave the error that ends the block in a file, for `longctx report`; of several processes the
    first one's. A run that has written nothing yet leaves nothing, as in a folder where another one
    has ended."""
    try:
        yield
    except BaseException as error:
        if (output / RECORD_FILE).is_file() and not ended_record(output):
            said = without_advice(str(error)) or type(error).__name__
            when = datetime.now().astimezone().isoformat(" ", "seconds")
            content = {"error": said, "rank": int(os.environ.get("RANK", "0")), "time": when}
            with suppress(OSError), (output / FAILURE_FILE).open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")
        raise


def mark_ended(output: Path, fingerprint: Mapping[str, Any]) -> None:
    """Say in the file that the run has written all that it will, and which run it was."""
    _write(output, _read(output) | {"ended": True, "fingerprint": fingerprint})


def ended_record(output: Path) -> dict[str, Any]:
    """Returns what the file says of a run that has ended there; empty where none has."""
    if not (output / RECORD_FILE).is_file() or not (output / "final").is_dir():
        return {}
    record = _read(output)
    return record if record.get("ended") else {}


def _read(output: Path) -> dict[str, Any]:
    """The record; empty where a loss of power has left half of it, or where it was deleted."""
    try:
        found: dict[str, Any] = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError):
        return {}
    return found


def _write(output: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    write_whole(output / RECORD_FILE, text.encode())
