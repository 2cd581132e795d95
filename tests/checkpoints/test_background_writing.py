"""Checkpoints that are written while the training goes on, on one process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

from longctx_patch.checkpoints import background as beside_module
from longctx_patch.checkpoints.manifest import MANIFEST
from longctx_patch.health.progress import TimeLimits
from longctx_patch.health.watchdog import Watchdog
from tests.checkpoints.small_state import Saver, TrainState, load, state_of, tiny_model, train
from tests.harness import run_distributed

MakeSaver = Callable[..., Saver]


@pytest.fixture
def state() -> TrainState:
    state = state_of(tiny_model(tie_word_embeddings=True))
    train(state)
    return state


@pytest.fixture
def make_saver(tmp_path: Path) -> MakeSaver:
    return partial(Saver, tmp_path)


def held_back() -> tuple[threading.Event, Any]:
    """(an event, what waits for it)."""
    may_write = threading.Event()

    def wait() -> None:
        assert may_write.wait(60)

    return may_write, wait


def test_each_checkpoint_is_of_its_step(state: TrainState, make_saver: MakeSaver) -> None:
    may_write, write = held_back()
    with make_saver(write) as saver:
        may_write.set()
        first = saver.save(state)
        train(state)
        saver.settle()
        may_write.clear()
        second = saver.save(state)  # into the memory of the first copy
        then = {name: value.clone() for name, value in state.model.state_dict().items()}
        losses = [train(state) for _ in range(3)]
        assert (first / MANIFEST).exists()
        assert not (second / MANIFEST).exists()
        may_write.set()
    weights = load_file(second / "model.safetensors")
    assert weights.keys() == then.keys() - {"lm_head.weight"}  # tied: it is saved once
    assert all(torch.equal(value, then[name]) for name, value in weights.items())
    load(state, second)
    assert [train(state) for _ in range(3)] == losses


def test_without_memory_for_a_copy_training_waits(
    state: TrainState,
    make_saver: MakeSaver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    saver = make_saver(say=said.append)
    monkeypatch.setattr(beside_module, "available_bytes", lambda: 2**10)
    for _ in range(2):
        place = saver.save(state)
        assert (place / MANIFEST).exists()
        train(state)
    (line,) = said
    assert "training waits while checkpoints are written" in line
    # Weights and two moments in float32, and the whole model in a file: counted here by hand.
    size = sum(parameter.numel() * 4 for parameter in state.model.parameters())
    tied = state.model.lm_head.weight.numel() * 4  # named twice
    assert f"{1.2 * (4 * size + 2 * tied) / 2**30:.1f} GiB" in line


def test_who_saves_more_often_than_it_takes_is_told(
    state: TrainState, make_saver: MakeSaver
) -> None:
    said, may_write = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        may_write.set()

    with make_saver(lambda: may_write.wait(60), say=say) as saver:
        saver.save(state)
        assert not said
        for _ in range(2):
            train(state)
            saver.save(state)
    (line,) = said
    assert "training waits while checkpoints are written: the one before still is, after" in line


def test_what_could_not_be_written_ends_the_training(
    state: TrainState, make_saver: MakeSaver
) -> None:
    def no_space() -> None:
        raise OSError(28, "No space left on device")

    saver = make_saver(no_space)
    place = saver.save(state)
    thread = saver._background._thread
    assert thread is not None
    thread.join(60)
    with pytest.raises(OSError, match="No space left"):
        saver.look()
    assert not (place / MANIFEST).exists()
    saver.settle()  # said once

    saver.save(state)
    with pytest.raises(OSError, match="No space left"):
        saver.save(state)


def test_ctrl_c_waits_for_no_checkpoint(state: TrainState, make_saver: MakeSaver) -> None:
    may_write = threading.Event()

    def interrupted() -> None:
        with make_saver(lambda: may_write.wait(60)) as saver:
            saver.save(state)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 30
    may_write.set()


class Waits:
    """Stands in for the watchdog: counts how often it is told of waiting, and is within."""

    def __init__(self) -> None:
        self.times = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        self.times += 1
        yield


def test_an_error_waits_for_a_checkpoint_under_the_watchdog_and_is_said_before(
    state: TrainState,
    make_saver: MakeSaver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else the limit of a step would end the job before the checkpoint is whole."""
    monkeypatch.setattr(beside_module, "SOON_S", 0.0)
    (may_write, write), waits = held_back(), Waits()

    @contextmanager
    def writes_now() -> Iterator[None]:
        with waits.saving():
            if waits.times == 2:
                threading.Timer(0.2, may_write.set).start()
            yield

    places: list[Path] = []

    def save_and_fail() -> None:
        with make_saver(write, waiting=writes_now, timeout_s=float("inf")) as saver:
            places.append(saver.save(state))
            raise ValueError("a step that went wrong")

    with pytest.raises(ValueError, match="a step that went wrong"):
        save_and_fail()
    assert waits.times == 2
    assert (places[0] / MANIFEST).exists()
    said = "rank 0 failed with ValueError: a step that went wrong\nIt ends when the last checkpoint"
    assert said in capsys.readouterr().err


def test_an_error_is_not_replaced_by_that_of_a_checkpoint(
    state: TrainState, make_saver: MakeSaver, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own one is no Exception."""

    def no_space() -> None:
        raise CheckpointException("torch's", {})

    def save_and_fail() -> None:
        with make_saver(no_space) as saver:
            saver.save(state)
            raise ValueError("a step that went wrong")

    with pytest.raises(ValueError, match="a step that went wrong"):
        save_and_fail()
    assert (
        "besides, the last checkpoint could not be written: Checkpoint" in capsys.readouterr().err
    )


def test_the_watchdog_is_told_what_is_written_and_where_an_error_was(
    state: TrainState, make_saver: MakeSaver
) -> None:
    """A failure in step 4 is none "in saving", though the checkpoint before it fails as well."""
    dog = Watchdog(TimeLimits())
    seen: list[str] = []
    dog.done(state.step)
    place = str(dog._progress.at)

    def fails() -> None:
        seen.append(str(dog._progress.at))
        raise OSError("a checkpoint that fails")

    def save_and_fail() -> None:
        with make_saver(fails, waiting=dog.saving, beside=dog.beside) as saver:
            saver.save(state)
            raise ValueError("a step that went wrong")

    with pytest.raises(ValueError, match="a step that went wrong"):
        save_and_fail()
    assert str(dog._progress.at) == place
    assert f"(while checkpoint-{state.step} is written)" in seen[0]


def test_training_waits_for_what_takes_longer_than_it_may(
    state: TrainState, make_saver: MakeSaver
) -> None:
    """So that the watchdog sees a disk that doesn't answer any more."""
    (may_write, write), waits = held_back(), Waits()
    with make_saver(write, waiting=waits.saving, timeout_s=3600) as saver:
        saver.save(state)
        saver.look()
        assert waits.times == 1  # in saving
        saver._timeout_s = 0.0
        threading.Timer(0.2, may_write.set).start()
        saver.look()
        assert waits.times == 2
        assert not saver._background.seconds()


def of_two_ranks(rank: int, folder: str) -> float:
    """A limit that is none, and how long the thread's exchanges wait."""
    state, limits = state_of(tiny_model()), []
    train(state)
    for timeout_s in (float("inf"), 5.0):
        with Saver(Path(folder) / str(timeout_s), timeout_s=timeout_s) as saver:
            saved = saver.save(state)
            group = saver._group
            assert group is not None
            limits.append(group._get_backend(torch.device("cpu")).options._timeout)
        assert (saved / MANIFEST).exists()
    return limits[1].total_seconds()


def test_exchanges_of_the_thread_outlast_the_watchdog(tmp_path: Path) -> None:
    """Which names the rank that has stopped: after the limit of the write, that of waiting for it,
    and that of a rank that is stopped."""
    for seconds in run_distributed(of_two_ranks, 2, str(tmp_path)):
        assert seconds > 3 * 5.0
