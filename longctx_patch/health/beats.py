"""What the ranks of a job tell each other through its store, while their groups may hang.

Each rank writes a beat every second or so. Another one reads them once it has waited too long.
"""

import contextlib
import json
from typing import Any, NamedTuple

import torch.distributed as dist

from longctx_patch.health.trail import read_trail

ALARM, SPEAKER = "alarm", "speaker"


class Beat(NamedTuple):
    """A rank's sign of life."""

    rank: int
    number: int
    """Of its beats: one that stays is no sign of life any more."""
    phase: str
    step: int
    seconds: float
    """Spent in what it is busy with."""
    at: str
    """The phase and step in words."""
    host: str
    pid: int
    born: float
    """When the process was started."""
    place: str = ""
    """Where it is, once it looks for what hangs."""
    waits: bool = False
    """Whether that is a wait for other ranks."""
    trail: str = ""
    """The file in which ranks of its machine find what it is busy with (`trail.py`)."""

    def at_last(self) -> "Beat":
        """With what the process was busy with last, if that is known. For ranks of its machine."""
        return self._replace(at=read_trail(self.trail) or self.at)


class Alarm(NamedTuple):
    """The first sign that the job has to end."""

    rank: int
    kind: str
    """`late`: a rank has been waiting too long; `failed`: a rank has said why it ends."""
    text: str


class Board:
    """One rank's connection to the store of the job. Methods raise what torch's stores raise."""

    def __init__(self, store: Any, world: int) -> None:
        self._store, self.world = store, world

    def publish(self, beat: Beat) -> None:
        self._store.set(f"beat/{beat.rank}", json.dumps(beat))

    def everyone(self) -> dict[int, Beat]:
        """The newest beat of each rank that has written one."""
        names = [f"beat/{rank}" for rank in range(self.world)]
        if not self._store.check(names):
            names = [name for name in names if self._store.check([name])]
        found = [Beat(*json.loads(text)) for text in self._store.multi_get(names)]
        return {beat.rank: beat for beat in found}

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """The job's alarm: this one, unless another rank was first."""
        first = self._store.compare_set(ALARM, "", json.dumps(alarm))
        return Alarm(*json.loads(first))

    def alarm(self) -> Alarm | None:
        if not self._store.check([ALARM]):
            return None
        return Alarm(*json.loads(self._store.get(ALARM)))

    def is_speaker(self) -> bool:
        """Whether this rank speaks for the job: the first one that asks."""
        return bool(self._store.add(SPEAKER, 1) == 1)


def board_of_job() -> Board | None:
    """A connection of its own to the store of torch.distributed; None where there is none, or where
    no other rank would read it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    with contextlib.suppress(RuntimeError, AttributeError):  # a store that can't be cloned
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        return Board(dist.PrefixStore("longctx-health", store), dist.get_world_size())
    return None
