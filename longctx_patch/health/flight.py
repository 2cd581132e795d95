"""The flight record of a rank: where it was when the job ended, as a JSON file."""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longctx_patch.health.beats import Beat
from longctx_patch.health.places import Place, stacks


def write_record(folder: Path, beat: Beat, reason: str, place: Place, nccl: list[Any]) -> Path:
    """Write `rank_N.json` of this process, and return its path. A run that hangs before it has made
    its output gets no record: the folder would not be empty for the next start."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rank_{beat.rank}.json"
    content = {
        "reason": reason,
        **beat._asdict(),
        "place": place._asdict(),
        "threads": stacks(),
        "nccl": nccl,
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return path


def unfinished_on_nccl() -> list[dict[str, Any]]:
    """Collectives that NCCL has not finished, the oldest first, by torch's own flight recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not torch.cuda.is_initialized():
        return []
    # Made by this process itself, in memory.
    entries = pickle.loads(dump()).get("entries", [])
    return [entry for entry in entries if entry.get("state") != "completed"]


def place_on_device(place: Place, unfinished: Sequence[Mapping[str, Any]]) -> Place:
    """The place of a process whose host waits for the device: in the oldest collective there."""
    if place.exchange or not unfinished:
        return place
    entry = unfinished[0]
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    _, group = entry.get("process_group", ("", "?"))
    name = f"{entry.get('profiling_name')}, number {number} of the group {group!r}, on the device"
    return place._replace(exchange=name, waits=True)
