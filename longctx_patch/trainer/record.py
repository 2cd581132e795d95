"""`longctx.json` beside saved weights: how they were trained. No run depends on it."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from longctx_patch.config import LongContextConfig

RECORD = "longctx.json"


def write_record(folder: str | Path, config: LongContextConfig, num_processes: int) -> None:
    """Write degrees, layout and versions into a folder, which is made if it is missing."""
    record = {
        "versions": {name: version(name) for name in ("longctx-patch", "torch", "transformers")},
        "num_processes": num_processes,
        "sequence_degree": config.sequence_degree,
        "config": asdict(config),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
