"""No process that a launcher forks connects to its store while others are still to be forked."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.plugin import siblings
from longctx_patch.plugin.siblings import BORN, wait_for_siblings


def passes(folder: Path, rank: int, number: int, delay_s: float, passed: Any) -> None:
    """One process of a launch: when it was there, and when it went on."""
    time.sleep(delay_s)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHELASTIC_ERROR_FILE", str(folder / str(rank) / "error.json"))
        patched.setenv("LOCAL_WORLD_SIZE", str(number))
        came = time.monotonic()
        wait_for_siblings()
        passed.put((came, time.monotonic()))


def test_all_wait_for_the_last(tmp_path: Path) -> None:
    context, number = multiprocessing.get_context("fork"), 3
    passed = context.Queue()
    for rank in range(number):
        (tmp_path / str(rank)).mkdir()
    delays = [0.0, 0.4, 0.2]
    started = [
        context.Process(target=passes, args=(tmp_path, rank, number, delay, passed))
        for rank, delay in enumerate(delays)
    ]
    for process in started:
        process.start()
    times = [passed.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    assert min(went for _, went in times) >= max(came for came, _ in times)


def test_one_that_never_comes_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "PATIENCE_S", 0.1)
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    wait_for_siblings()
    assert (tmp_path / "0" / BORN).exists()
