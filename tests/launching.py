"""Programs are started as a user starts them, in an environment without a launcher's variables."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longctx_patch.cli.main import main as longctx
from longctx_patch.transport.processes import forking

OURS = ("ACCELERATE_", "PARALLELISM_")


def clean_environment() -> dict[str, str]:
    """That of a shell in which nothing was launched."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_module(folder: Path, *words: str) -> str:
    """What `python -m WORDS` in `folder` prints, on CPUs; a failure shows the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def start_forked(function: Callable[..., Any], log: Path, *args: Any) -> Any:
    """The process that runs `function(*args)` in a session of its own, and says all into `log`,
    which may be a terminal. It is forked from a server that has imported what this process has."""
    process = forking("gloo", function).Process(target=_say_into, args=(log, function, args))
    process.start()
    return process


def start_longctx(log: Path, *words: object) -> Any:
    """The process of `longctx WORDS`, forked with its imports."""
    return start_forked(_longctx, log, [str(word) for word in words])


def _longctx(words: list[str]) -> None:  # a click command isn't pickled
    longctx(words)


def run_longctx(log: Path, *words: object) -> tuple[int | None, str]:
    """The exit code of `longctx WORDS`, and what it has printed."""
    process = start_longctx(log, *words)
    process.join(250)
    process.kill()
    process.join()
    return process.exitcode, log.read_text()


def _say_into(log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()  # a terminal that is opened then is the session's
    file = os.open(log, os.O_RDWR | os.O_CREAT)
    for stream in range(3):
        os.dup2(file, stream)
    environment = clean_environment()
    os.environ.clear()
    os.environ.update(environment)
    try:
        function(*args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
