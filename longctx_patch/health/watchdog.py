"""`Watchdog` ends a job that hangs, and says which rank, step, layer and exchange it was.

Two threads run beside the training: one counts the time, the other (`beats.py`) exchanges signs of
life with other ranks. Training only marks what it begins, which waits for nothing.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from longctx_patch.health import last_words
from longctx_patch.health.beats import Alarm, Beat, Teller
from longctx_patch.health.finite import BadStepError
from longctx_patch.health.last_words import say, undisturbed
from longctx_patch.health.places import (
    OWN_THREADS,
    Place,
    place_here,
    place_of_error,
    place_on_device,
    stacks,
    unfinished_on_nccl,
)
from longctx_patch.health.progress import Phase, Progress, TimeLimits
from longctx_patch.health.replicas import ReplicasDivergedError
from longctx_patch.health.verdict import judge, lost
from longctx_patch.rules.launched import announced_processes

FAILED_S = 5.0
"""How long ranks may end by themselves once another one has failed."""
TRIES = 5
SAY_WHERE = (ValueError, BadStepError, ReplicasDivergedError)
"""Errors whose own message says where, if that matters."""
REPORT_S = 2.0
"""How long a rank that fails waits for the store."""


class Watchdog:
    """Watches this process, and the other ranks through it, as a context.

    Args:
        limits: how long each part of the run may take.
        folder: where flight records go if the job hangs; None: nowhere.
        interval_s: seconds between signs of life.
        end: ends the process with an exit code.

    Once a limit passes on some rank, each rank writes `rank_N.json` into `folder`, one prints what
    the job waits for, and all end with exit code 1; a rank of the same machine that was stopped is
    killed. A process whose launcher (torchrun, `accelerate launch`) is gone ends as well.

    Example:
        >>> with Watchdog(TimeLimits(), folder=Path("out/flight")) as watchdog:  # doctest: +SKIP
        ...     for step, batch in enumerate(loader, start=1):
        ...         train(batch)
        ...         watchdog.done(step)
        ...     with watchdog.saving():
        ...         save()
    """

    def __init__(
        self,
        limits: TimeLimits | None = None,
        *,
        folder: Path | None = None,
        interval_s: float = 1.0,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._progress = Progress(limits or TimeLimits())
        self._folder, self._end = folder, end
        self._launcher = last_words.launcher()
        self._identity = (socket.gethostname(), os.getpid(), last_words.born_at())
        self._place: Place | None = None
        self._odd_since: dict[int, float] = {}
        """When ranks of this machine were first seen stopped or gone."""
        self._closing = threading.Event()
        self._teller = Teller(self._beat, interval_s)
        self._clock = threading.Thread(target=self._watch, name=f"{OWN_THREADS}-clock", daemon=True)

    @property
    def limits(self) -> TimeLimits:
        """Returns how long each part of the run may take."""
        return self._progress.limits

    # ---- What the training marks ----

    def done(self, step: int) -> None:
        """Step number `step` is done; the next one begins."""
        self._progress.done(step)

    def enter(self, phase: Phase) -> None:
        """Another part of the run begins: a batch of an evaluation, saving, the next step after
        them, or the end."""
        self._progress.enter(phase)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within the context a checkpoint is saved."""
        before = self._progress.at.phase
        self._progress.enter("save")
        yield
        self._progress.enter(before)

    @contextmanager
    def beside(self, words: str) -> Iterator[None]:
        """Within the context another thread does something beside the training, such as
        "checkpoint-4 is written"."""
        self._progress.beside(words)
        try:
            yield
        finally:
            self._progress.beside("")

    def __enter__(self) -> "Watchdog":
        self._teller.start()
        self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        if isinstance(error, Exception):
            with undisturbed():
                self._report(error)
        self.close()

    def close(self) -> None:
        """Watch no longer. The other ranks learn that this one has come to its end."""
        self._progress.enter("end")
        self._closing.set()
        self._teller.close()
        if self._clock.is_alive():
            self._clock.join(2 * self._teller.interval_s)

    # ---- The thread that counts the time ----

    def _watch(self) -> None:
        while not self._closing.wait(self._teller.interval_s):
            if self._launcher not in (None, os.getppid()):
                self._end_orphan()
            alarm = self._teller.alarm or self._late() or self._lost()
            if alarm is not None:
                self._answer(self._teller.raise_alarm(alarm))
                return

    def _late(self) -> Alarm | None:
        limit_s = self._progress.limit_s()
        if self._progress.seconds() <= limit_s:
            return None
        at = self._progress.at
        text = f"{at} has taken longer than its limit of {limit_s:.0f} s on rank {_rank()}"
        return Alarm(_rank(), "late", text)

    def _lost(self) -> Alarm | None:
        """A rank of this machine that is gone without having come to its end, or that has been
        stopped for as long as a step may take. For these no long limit of a start is waited for."""
        for rank, beat in self._peers_here().items():
            state = "runs" if beat.phase == "end" else last_words.state_of(beat.pid, beat.born)
            if state == "runs":
                self._odd_since.pop(rank, None)
                continue
            odd_s = time.monotonic() - self._odd_since.setdefault(rank, time.monotonic())
            if state == "stopped" and odd_s > self._progress.limit_s("step"):
                return Alarm(_rank(), "late", f"rank {rank} has been stopped for {odd_s:.0f} s")
            if state == "gone" and odd_s > self._teller.interval_s:  # it has been read anew
                return Alarm(_rank(), "late", f"rank {rank} is gone")
            self._teller.look_again()  # it may have come to its end since it was read
        return None

    def _answer(self, alarm: Alarm) -> None:
        """End this process, for the job has to end."""
        if alarm.kind == "failed":
            if alarm.rank != _rank() and not self._closing.wait(FAILED_S):
                self._finish()
            return  # it ends by itself
        try:
            self._explain(alarm)
        finally:  # whatever goes wrong with words, the job has to end
            if not self._closing.is_set():
                self._finish()

    def _explain(self, alarm: Alarm) -> None:
        """Leave a record, and print who is waited for."""
        nccl = unfinished_on_nccl()
        self._place = place_on_device(place_here(), nccl)
        with suppress(OSError):
            if self._folder is not None:
                self._write_record(self._folder, alarm.text, self._place, nccl)
        beats = self._teller.read()
        if not self._closing.is_set():
            self._speak(self._teller.alarm or alarm, beats)

    def _write_record(self, folder: Path, reason: str, place: Place, nccl: list[Any]) -> None:
        """Write `rank_N.json`. A run that hangs before it has made its output gets no record: the
        folder would not be empty for the next start."""
        folder.mkdir(exist_ok=True)
        said = {"reason": reason, **self._beat()._asdict(), "place": place._asdict()}
        text = json.dumps(said | {"threads": stacks(), "nccl": nccl}, indent=2, default=str)
        (folder / f"rank_{_rank()}.json").write_text(text + "\n", encoding="utf-8")

    def _speak(self, alarm: Alarm, beats: dict[int, Beat] | None) -> None:
        """Print what the job waits for, or leave that to the rank that has raised the alarm."""
        here = self._peers_here()
        states = {rank: last_words.state_of(beat.pid, beat.born) for rank, beat in here.items()}
        ranks: Iterable[int] = range(self._teller.world)
        announced, lost = announced_processes(), ""
        if self._teller.world < announced:
            lost = f"\nThe {announced} processes of the job have not all met yet."
        elif beats is None and self._teller.world > 1:
            lost = (
                "\nThe job's store doesn't answer: the process that holds it has stopped or ended."
            )
        speaker = alarm.rank
        if beats is None:  # what is known of this machine
            ended = {rank: beat for rank, beat in here.items() if states[rank] != "runs"}
            beats = {rank: beat._replace(at="") for rank, beat in ended.items()}
            beats[_rank()], ranks = self._beat(), sorted([*ended, _rank()])
            speaker = min([*here.keys() - ended.keys(), _rank()])
        if _rank() != speaker:
            time.sleep(self._teller.interval_s)  # the launcher ends all as soon as one has ended
            return
        where = "" if self._folder is None else f"\nEach rank's record: {self._folder}/rank_*.json."
        say(
            f"watchdog: {alarm.text}, so the job ends.{lost}\n"
            f"{judge(beats, ranks, states).text}{where}\nA limit is raised with --step-timeout, "
            "--start-timeout or --save-timeout SECONDS (TimeLimits)."
        )

    def _finish(self) -> None:
        """End this process, with what it has started, and ranks of this machine that are stopped,
        which can't end by themselves."""
        for beat in self._peers_here().values():
            if last_words.state_of(beat.pid, beat.born) == "stopped":
                last_words.kill(beat.pid, beat.born)
        last_words.kill_children()
        self._end(1)

    def _end_orphan(self) -> None:
        say(f"watchdog: rank {_rank()} ends in {self._progress.at}: its launcher is gone.")
        self._finish()

    # ---- What is said ----

    def _report(self, error: Exception) -> None:
        """Tell the other ranks that this one fails, and print where, unless one was first."""
        at, place = self._progress.at, place_of_error(error)
        gone = "" if isinstance(error, SAY_WHERE) else self._gone()
        text = f"{gone}rank {_rank()} failed in {at}: {place}"
        is_alone = max(self._teller.world, announced_processes()) == 1
        alarm = Alarm(_rank(), "failed", text)
        alarm = self._teller.raise_alarm(alarm, 0.0 if is_alone else REPORT_S)
        if alarm.rank != _rank():
            error.add_note(f"Before that: {alarm.text}.")
        elif not isinstance(error, SAY_WHERE):
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            say(f"watchdog: {text}: {type(error).__name__}: {error}{notes}")

    def _gone(self) -> str:
        """Ranks of this machine that are gone, in words. A connection is lost a moment before its
        process is."""
        for _ in range(TRIES):
            if words := lost([beat for beat in self._peers_here().values() if _is_lost(beat)]):
                return words
            time.sleep(0.01)
        return ""

    def _beat(self) -> Beat:
        at, place = self._progress.at, self._place
        return Beat(
            _rank(),
            at.phase,
            at.step,
            self._progress.seconds(),
            str(at),
            *self._identity,
            str(place or ""),
            place is not None and place.waits,
        )

    def _peers_here(self) -> dict[int, Beat]:
        """Other ranks of this machine."""
        host = self._identity[0]
        peers = self._teller.peers.items()
        return {rank: beat for rank, beat in peers if beat.host == host and rank != _rank()}


def _is_lost(beat: Beat) -> bool:
    """Says whether a rank of this machine is gone before it came to its end."""
    return beat.phase != "end" and last_words.state_of(beat.pid, beat.born) == "gone"


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
