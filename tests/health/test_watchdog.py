"""The watchdog in one process, with an end of the test's own in place of the process's."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from longctx_patch.health import last_words, watchdog
from longctx_patch.health.beats import Alarm, Beat, Board, Teller
from longctx_patch.health.places import Place, place_on_device
from longctx_patch.health.progress import Phase, TimeLimits
from longctx_patch.health.watchdog import Watchdog

SHORT = TimeLimits(start_s=0.2, step_s=0.2, save_s=0.2)
WAIT_S = 60.0
"""A time limit of tests, far above what they take."""


class Ends:
    """Stands for `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.came.set()


@pytest.fixture(autouse=True)
def ended_children(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Notes when this process's children would be ended: one is the server that other tests fork
    their processes from."""
    calls: list[None] = []
    monkeypatch.setattr(last_words, "kill_children", lambda: calls.append(None))
    return calls


def watching(ends: Ends, folder: Path | None, limits: TimeLimits = SHORT) -> Watchdog:
    return Watchdog(limits, folder=folder, interval_s=0.02, end=ends)


def codes_at_the_end(folder: Path | None, limits: TimeLimits = SHORT, done: int = 0) -> list[int]:
    """With which codes the watchdog ends a process in which no more happens."""
    ends = Ends()
    with watching(ends, folder, limits) as dog:
        if done:
            dog.done(done)
        assert ends.came.wait(WAIT_S)
    return ends.codes


def test_a_step_that_takes_too_long_ends_the_process_with_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended_children: list[None]
) -> None:
    assert codes_at_the_end(tmp_path / "flight", done=6) == [1]
    assert len(ended_children) == 1
    record = json.loads((tmp_path / "flight" / "rank_0.json").read_text())
    assert record["reason"] == "step 7 has taken longer than its limit of 0 s on rank 0"
    assert (record["rank"], record["step"], record["phase"]) == (0, 7, "step")
    assert any("test_watchdog.py" in frame for frame in record["threads"]["MainThread"])
    said = capsys.readouterr().err
    assert said.count("so the job ends") == 1
    assert "raised with --step-timeout" in said


def test_nothing_is_written_into_an_output_that_is_not_there_yet(tmp_path: Path) -> None:
    """Else the next start would find its output filled."""
    assert codes_at_the_end(tmp_path / "out" / "flight") == [1]
    assert not (tmp_path / "out").exists()


def test_a_start_in_which_processes_do_not_meet_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    codes_at_the_end(None)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("watchdog: the start, before the end of the first step has taken")
    assert said[1] == "The 3 processes of the job have not all met yet."
    assert said[2].startswith("  rank 0: the start")


def test_a_device_that_waits_is_named_by_its_oldest_collective() -> None:
    """The form of torch's flight recorder of NCCL (2.11)."""
    entry = {"process_group": ("3", "ranks that share a row"), "collective_seq_id": 7}
    entry |= {"profiling_name": "nccl:all_gather", "state": "started", "p2p_seq_id": 0}
    place = place_on_device(Place("recipes/train_step.py:60 train_step"), [entry])
    assert place.waits
    assert str(place) == (
        "nccl:all_gather, number 7 of the group 'ranks that share a row', on the device, "
        "at recipes/train_step.py:60 train_step"
    )
    host = Place("x.py:1 f", exchange="all_reduce of torch.distributed", waits=True)
    assert place_on_device(host, [entry]) == host
    assert place_on_device(Place("x.py:1 f"), []) == Place("x.py:1 f")


def test_steps_within_the_limit_go_on(tmp_path: Path) -> None:
    ends = Ends()
    with watching(ends, tmp_path, TimeLimits(step_s=WAIT_S)) as dog:
        for step in range(1, 9):
            dog.done(step)
        with dog.saving():
            assert str(dog._progress.at) == "saving after step 8"
        assert not ends.came.wait(0.1)
    assert not list(tmp_path.iterdir())
    assert not ends.codes


def test_it_ends_the_process_also_if_it_finds_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("a pipe that nobody reads")

    monkeypatch.setattr(watchdog, "judge", fails)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert codes_at_the_end(None) == [1]


def test_a_process_whose_launcher_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "launcher", lambda: 4_000_000)
    assert set(codes_at_the_end(None, TimeLimits())) == {1}


def test_a_rank_that_is_stopped_is_found_in_a_phase_that_may_take_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Saving and starting may take half an hour, but a process that is stopped doesn't save."""
    peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        peer.send_signal(signal.SIGSTOP)
        ends = Ends()
        with watching(ends, None, TimeLimits(step_s=0.2)) as dog:
            host, _, _ = dog._identity
            born = last_words.born_at(peer.pid)
            dog._teller.peers = {1: Beat(1, "step", 4, 1.0, "step 4", host, peer.pid, born)}
            assert ends.came.wait(WAIT_S)
        assert peer.wait(WAIT_S) == -signal.SIGKILL
    finally:
        peer.kill()
    said = capsys.readouterr().err
    assert "watchdog: rank 1 has been stopped for 0 s, so the job ends" in said
    assert " was stopped by a signal.\n" in said


@pytest.mark.parametrize(
    ("phases", "named"),
    [
        ({2: "step"}, r"rank 2 \(process \d+\) is gone; rank 0 failed in the start, before"),
        ({1: "end", 2: "step"}, r"rank 2 \(process \d+\) is gone; rank 0"),
        ({1: "end"}, "rank 0 failed in the start, before"),
        (
            {1: "step", 2: "step"},
            r"ranks 1, 2 are gone \(a launcher ends all after the f",
        ),
    ],
)
def test_an_error_by_a_rank_that_is_gone_names_that_one(
    phases: dict[int, Phase], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """But none that has come to its end."""

    def fails() -> None:
        with watching(Ends(), None, TimeLimits()) as dog:
            host, pid, born = dog._identity
            dog._teller.peers = {
                rank: Beat(rank, phase, 1, 1.0, "step 1", host, pid, born + 1)
                for rank, phase in phases.items()
            }
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        fails()
    said = capsys.readouterr().err
    assert re.match(f"watchdog: {named}", said)
    assert "Connection closed by peer" in said


def test_an_error_is_named_with_its_step_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with watching(Ends(), None, TimeLimits()) as dog:
            dog.done(3)
            raise KeyError("something of the user's")

    with pytest.raises(KeyError, match="of the user"):
        fails()
    said = capsys.readouterr().err
    assert said.startswith("watchdog: rank 0 failed in step 4: at health/test_watchdog.py:")
    assert "KeyError" in said


def test_a_refusal_at_the_start_is_left_to_its_own_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="not set"), watching(Ends(), None, TimeLimits()):
        raise ValueError("model is not set")
    assert capsys.readouterr().err == ""


def beats_of(rank: int, place: str = "a place") -> Callable[[], Beat]:
    return lambda: Beat(rank, "step", 5, 0.0, "step 5", "host", 1, 0.0, place)


def test_ranks_learn_of_an_alarm_and_read_who_lives() -> None:
    """Two ranks over one store; a third has never come, and a fourth has fallen silent."""
    store = HashStore()
    boards = [Board(store, 4) for _ in range(2)]
    boards[0].publish(beats_of(3, "")())
    tellers = [
        Teller(beats_of(rank), 0.02, find_board=lambda rank=rank: boards[rank])  # type: ignore[misc]
        for rank in range(2)
    ]
    for teller in tellers:
        teller.start()
    first = tellers[0].raise_alarm(Alarm(0, "late", "step 5"), WAIT_S)
    assert first == Alarm(0, "late", "step 5")
    while tellers[1].alarm is None:  # who knows of one waits for no answer to its own
        time.sleep(0.01)
    assert tellers[1].raise_alarm(Alarm(1, "late", "step 6"), WAIT_S) == first
    for teller in tellers:
        found = teller.read()
        assert found is not None
        assert {rank: beat.place for rank, beat in found.items()} == {
            **{0: "a place", 1: "a place"},
            3: "",
        }
        teller.close()
