"""`longctx.json` beside saved weights: how they were trained. A run can resume without it."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils.constants import FSDP_MODEL_NAME

from longctx_patch.hf.handle import PatchHandle
from longctx_patch.rules.versions import installed_version

logger = logging.getLogger(__name__)

RECORD = "longctx.json"
NAMED = "longctx-patch", "torch", "transformers"
"""Packages whose versions are noted."""
UNLIKE = {"transformers_version", "architectures", "use_cache", "dtype", "torch_dtype"}
"""Fields of a model's config that change no number of a training, or are set by libraries."""


def record_of(handle: PatchHandle, num_processes: int) -> dict[str, Any]:
    """Degrees, layout and versions of a run."""
    return {
        "versions": {name: installed_version(name) for name in NAMED},
        "num_processes": num_processes,
        "sequence_degree": handle.config.sequence_degree,
        "has_mask": handle.mask is not None,
        "config": asdict(handle.config),
        "model": _fields_of(handle.model.config),
    }


def write_record(folder: str | Path, record: dict[str, Any]) -> None:
    """Write it into a folder, which is made if it is missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def promises_manifest(folder: str | Path) -> bool:
    """Says whether a checkpoint was begun that gets a manifest at its end."""
    path = Path(folder) / RECORD
    try:
        return json.loads(path.read_text("utf-8")).get("gets_manifest") is True
    except FileNotFoundError:
        return False
    except (ValueError, AttributeError):  # cut off while it was written, or not ours
        return True


def resume_problems(folder: str | Path, now: dict[str, Any]) -> Iterable[str]:
    """Says why the run that `now` describes can't go on from a checkpoint, in words."""
    before = _read(folder, now)
    group, own = (run["config"].get("shifted_group", 0) for run in (before, now))
    if group != own:
        yield (
            f"{folder} was trained with shifted_group={group}, and this run has {own}, so tokens "
            f"would see others than before. Resume with {group}, or load its weights into a run of "
            "its own."
        )
    has_mask = before.get("has_mask", now["has_mask"])
    if has_mask != now["has_mask"]:
        way = "with" if has_mask else "without"
        yield (
            f"{folder} was trained {way} a mask, so tokens would see others than before. Resume "
            f"{way} one, or load its weights into a run of its own."
        )


def format_problems(folder: str | Path, *, is_fsdp: bool) -> Iterable[str]:
    """Says why transformers can't read a checkpoint: its format depends on who held the weights."""
    was = any(FSDP_MODEL_NAME in path.name for path in Path(folder).iterdir())
    if was == is_fsdp:
        return
    then, now = ("FSDP", "DDP or one process") if was else ("DDP or one process", "FSDP")
    weights = "" if was else f", or train a model loaded from {folder} in a run of its own"
    yield (
        f"{folder} was saved under {then}, and this run is under {now}: transformers has other "
        f"files for each. Go on under {then}{weights}."
    )


def log_changes(folder: str | Path, now: dict[str, Any]) -> None:
    """Log how the run that `now` describes differs from that of a checkpoint."""
    before = _read(folder, now)
    old, new = (
        run["config"]
        | {"num_processes": run["num_processes"]}
        | {"replicas": run["num_processes"] // run["sequence_degree"]}
        for run in (before, now)
    )
    changed = [f"{k}={v!r} (was {old[k]!r})" for k, v in new.items() if old.get(k, v) != v]
    if old["replicas"] != new["replicas"]:
        text = "%s resumes with %s: as with a stock trainer, steps have other rows than before"
        logger.warning(text, folder, ", ".join(changed))
    elif changed:
        logger.info("%s resumes with %s", folder, ", ".join(changed))
    was, fields = before.get("model", {}), now.get("model", {})
    others = [f"{n}={fields[n]!r} (was {v!r})" for n, v in was.items() if fields.get(n, v) != v]
    if others:
        text = "%s resumes with another model than it was saved with, so its numbers are others: %s"
        logger.warning(text, folder, ", ".join(others))


def _fields_of(config: Any) -> dict[str, Any]:
    """A model's config as it is read back from JSON."""
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    kept = {n: v for n, v in fields.items() if n[0] != "_" and n not in UNLIKE}
    return {n: v for n, v in kept.items() if not n.endswith("_token_id")}


def _read(folder: str | Path, now: dict[str, Any]) -> dict[str, Any]:
    """Returns what `write_record` wrote into a folder; `now` where a stock trainer saved."""
    path = Path(folder) / RECORD
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else now
    return found
