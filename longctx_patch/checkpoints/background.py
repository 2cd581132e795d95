"""A task that runs in a thread beside the training, one at a time, and whose errors are raised."""

import threading
import time
from collections.abc import Callable


class Background:
    """Runs one task at a time in a thread.

    A thread that is left behind doesn't keep the process alive: a job that fails ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._began = 0.0

    def seconds(self) -> float:
        """For how long the task that runs now has run; 0 where none does."""
        runs = self._thread is not None and self._thread.is_alive()
        return time.monotonic() - self._began if runs else 0.0

    def start(self, task: Callable[[], object]) -> None:
        """Run a task; the one before is waited for. Raises its error."""
        self.settle()
        self._began = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(task,), name="longctx-saving", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Raise the error of a task that has failed. Waits for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs, at most `timeout_s`. Raises the error of the task."""
        if self._thread is not None:
            # join takes no infinity
            self._thread.join(timeout_s and min(timeout_s, threading.TIMEOUT_MAX))
        self.look()

    def _run(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            self._error = error
