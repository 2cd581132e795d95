"""Lets the ranks of a job tell each other through its store where they are, while groups may hang.

Each rank writes a beat every second or so. Another one reads them once it has waited too long. A
thread of its own talks to the store: a store that no longer answers, since the process that holds
it was stopped, must not keep the thread that counts the time from ending this process.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from longctx_patch.health.places import OWN_THREADS

ALARM = "alarm"
BETWEEN = 3
"""Beats after which a living rank has answered an alarm, with one that has its place."""
RANKS_A_SECOND = 200
"""Ranks of large jobs write more rarely: the store serves all of them from one process."""
SEARCH_S = 0.05
"""Between looks for a store or a rank that is not there yet: so those that stop as they begin are
known."""


class Beat(NamedTuple):
    """A rank's sign of life."""

    rank: int
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
    """Where it is, once it has answered an alarm."""
    waits: bool = False
    """Whether that is a wait for other ranks."""


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


class Teller:
    """Tells `make_beat()` every `interval_s` seconds, until `close`."""

    def __init__(
        self,
        make_beat: Callable[[], Beat],
        interval_s: float,
        find_board: Callable[[], Board | None] = board_of_job,
    ) -> None:
        self.alarm: Alarm | None = None
        """The job's alarm, once there is one."""
        self.peers: dict[int, Beat] = {}
        """All ranks as they were when they had all come, or when they were looked at again."""
        self.world = 1
        """Number of ranks, once the job has a store."""
        self._make_beat, self.interval_s, self._find_board = make_beat, interval_s, find_board
        self._board: Board | None = None
        self._mine: Alarm | None = None
        self._found: dict[int, Beat] | None = None
        self._looks, self._reads, self._closing = False, False, False
        self._wake, self._is_raised, self._is_read = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell a last time, and end."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.interval_s)

    def raise_alarm(self, alarm: Alarm, timeout_s: float = 0.0) -> Alarm:
        """Tell all ranks, unless another one was first: then that is the alarm. Waits for the store
        `timeout_s` at most."""
        self._mine = alarm
        self._wake.set()
        self._is_raised.wait(timeout_s)
        return self.alarm or alarm

    def look_again(self) -> None:
        """Read all ranks anew, soon."""
        self._looks = True

    def read(self) -> dict[int, Beat] | None:
        """Read all ranks once they had time to answer an alarm; None where no store answers."""
        self._reads = True
        self._wake.set()
        self._is_read.wait((BETWEEN + 2) * self.interval_s + 1.0)
        return self._found

    def _run(self) -> None:
        try:
            while not self._closing:
                self._tell()
                if self._reads:
                    return self._read()
                self._wake.wait(self._pause_s())
                self._wake.clear()
            self._tell()
        except RuntimeError:  # torch's stores raise it where the one that holds them is gone
            pass
        finally:
            self._is_raised.set()
            self._is_read.set()

    def _tell(self) -> None:
        board = self._board = self._board or self._find_board()
        if board is None:
            return
        self.world = board.world
        self.interval_s = max(self.interval_s, board.world / RANKS_A_SECOND)
        board.publish(self._make_beat())
        if self.alarm is None and self._mine is not None:
            self.alarm = board.raise_alarm(self._mine)
        self.alarm = self.alarm or board.alarm()
        if self.alarm is not None:
            self._is_raised.set()
        if self._looks or len(self.peers) < board.world:
            self._looks = False
            self.peers = board.everyone()

    def _pause_s(self) -> float:
        """Short until every rank is known: who is lost before that can't be named."""
        if self._board is not None and len(self.peers) == self.world:
            return self.interval_s
        return min(self.interval_s, max(SEARCH_S, self.world / RANKS_A_SECOND))

    def _read(self) -> None:
        for _ in range(BETWEEN if self._board else 0):
            time.sleep(self.interval_s)
            self._tell()
        self._found = self._board.everyone() if self._board else None
