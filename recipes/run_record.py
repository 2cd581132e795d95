"""`settings.json` of a run's output: the settings as they were used, flags over the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD_FILE = "settings.json"


def write_record(output: Path, settings: Mapping[str, Any], processes: int) -> None:
    """Write the file into a folder, which is made if it is missing; a resumed run replaces it."""
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"processes": processes, "settings": settings}, indent=2) + "\n"
    (output / RECORD_FILE).write_text(text, encoding="utf-8")
