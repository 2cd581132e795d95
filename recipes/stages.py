"""Times what a start is busy with until its first step."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

START_FILE = "start.json"


class Stages:
    """The stages of one start, counted from the launcher's.

    Each is named on the screen as it begins, with the seconds since the launch:

        [ 13.1 s] reading the model
    """

    def __init__(
        self,
        *,
        speaks: bool | None = None,
        launched: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Only a process that `speaks` prints and writes; default: the launcher's first one.

        Args:
            launched: when the launch began, in seconds since the epoch; default: when the process
                that started this one did, or this one itself if no launcher did.
            now: the clock.
        """
        self._speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks
        self._now = now
        self._begins = [("launch and imports", launched_at() if launched is None else launched)]

    def enter(self, name: str) -> None:
        """Begin the next stage, which ends the one before it."""
        self._begins.append((name, self._now()))
        self._say(name)

    def end(self, output: Path) -> None:
        """End the last stage; print all of them, and write them to `start.json` in `output`."""
        (_, launched), done = self._begins[0], self._now()
        ends = [begin for _, begin in self._begins[1:]] + [done]
        seconds = {
            name: round(end - begin, 2)
            for (name, begin), end in zip(self._begins, ends, strict=True)
        }
        self._begins.append(("", done))
        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        self._say(f"the first step is done: {parts}")
        if self._speaks:
            text = json.dumps({"launched": launched, "seconds": seconds}, indent=2)
            (output / START_FILE).write_text(text + "\n", encoding="utf-8")

    def _say(self, text: str) -> None:
        if self._speaks:
            since = self._begins[-1][1] - self._begins[0][1]
            print(f"[{since:5.1f} s] {text}", flush=True)


def launched_at() -> float:
    """When the launcher started, in seconds since the epoch; without one, when this process did."""
    process = psutil.Process()
    launcher = process.parent() if "LOCAL_RANK" in os.environ else None
    started: float = (launcher or process).create_time()
    return started
