"""`settings.json` of a run's output: the settings as they were used, flags over the file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from longctx_patch.recipes.settings import Settings

RECORD_FILE = "settings.json"


def write_record(output: Path, settings: Settings, processes: int) -> None:
    """Write the file; a resumed run replaces it."""
    content = {"processes": processes, "settings": dataclasses.asdict(settings)}
    text = json.dumps(content, indent=2) + "\n"
    (output / RECORD_FILE).write_text(text, encoding="utf-8")


def read_record(output: Path) -> dict[str, Any]:
    """The settings that a run was started with; empty where none were written."""
    path = output / RECORD_FILE
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["settings"]
    return found
