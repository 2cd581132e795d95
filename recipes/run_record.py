"""`settings.json` of a run's output: the settings as they were used, flags over the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx_patch.recipes.saving.files import write_whole

RECORD_FILE = "settings.json"
ENDED = "resume: the run has ended, and {}/final is there"


def write_record(output: Path, settings: Mapping[str, Any], processes: int) -> None:
    """Write the file into a folder, which is made if it is missing; a resumed run replaces it."""
    output.mkdir(parents=True, exist_ok=True)
    _write(output, {"processes": processes, "settings": settings})


def mark_ended(output: Path) -> None:
    """Say in the file that the run has written all that it will."""
    _write(output, _read(output) | {"ended": True})


def has_ended(output: Path, **length: object) -> bool:
    """Whether a run with settings of this `length` has ended there."""
    if not (output / RECORD_FILE).is_file() or not (output / "final").is_dir():
        return False
    record = _read(output)
    settings = record.get("settings", {})
    same = all(settings.get(name) == value for name, value in length.items())
    return bool(record.get("ended")) and same


def _read(output: Path) -> dict[str, Any]:
    """The record; empty where a loss of power has left half of it."""
    try:
        found: dict[str, Any] = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found


def _write(output: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    write_whole(output / RECORD_FILE, text.encode())
