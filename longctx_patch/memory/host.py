"""Memory of the host that processes may still take, in bytes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # version 1 writes a number of this size where there is no limit


class Room(NamedTuple):
    """Bytes that one control group has left, and its limit."""

    left: int
    limit: int


def available_bytes() -> int:
    """Bytes that the machine has left, or this process's control groups (containers, batch systems)
    if they have less."""
    return min([psutil.virtual_memory().available, *(room.left for room in rooms_of_groups())])


def total_bytes() -> int:
    """Memory of the machine, or the least limit of this process's control groups."""
    return min([psutil.virtual_memory().total, *(room.limit for room in rooms_of_groups())])


def rooms_of_groups(groups: Path = GROUPS, root: Path = ROOT) -> list[Room]:
    """The memory that each control group with a limit has left: this process's own and those above.

    Cached files count as left, since the kernel gives them up first. Both versions of the interface
    are read (kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory).
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            rooms += [_room(folder, *names) for folder in _with_parents(root, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += [_room(folder, *names) for folder in _with_parents(root / "memory", path)]
    return [room for room in rooms if room is not None]


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it up to `root`, which may be the group's itself."""
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _room(folder: Path, limit: str, usage: str, cached: str) -> Room | None:
    """The memory that one group has left; None if it has no limit or no such folder."""
    with suppress(OSError, ValueError):  # "max" is no number
        most = int((folder / limit).read_text())
        if most < _UNLIMITED:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(stat.get(cached, 0))
            return Room(max(0, most - used), most)
    return None
