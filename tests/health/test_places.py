"""Where the threads of a process are: layers, direction and exchange, from frames alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, patch
from longctx_patch.health.places import (
    OWN_THREADS,
    Place,
    place_here,
    place_of_error,
    stacks,
)
from tests.harness import run_distributed
from tests.hf.tiny import tiny_model


@contextmanager
def held_by(function: Any) -> Iterator[None]:
    """Run a function in a thread that waits until it is released; see where it is meanwhile."""
    thread = threading.Thread(target=function, name="holds")
    thread.start()
    yield
    thread.join()


def wait(came: threading.Event, go_on: threading.Event) -> None:
    came.set()
    go_on.wait(60)


def test_every_thread_has_its_frames() -> None:
    came, go_on = threading.Event(), threading.Event()
    with held_by(lambda: wait(came, go_on)):
        assert came.wait(60)
        frames = stacks()
        go_on.set()
    assert any(frame.endswith(" wait") and "test_places" in frame for frame in frames["holds"])
    assert place_here().code.startswith("health/places.py")


def in_file(name: str, function: str) -> Any:
    """A function in a file of this name: it releases a lock, and waits for another one, which takes
    no frame of Python's."""
    made: dict[str, Any] = {}
    code = f"def {function}(came, go_on): came.release(), go_on.acquire()"
    exec(compile(code, name, "exec"), made)
    return made[function]


def held_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def test_a_thread_that_saves_does_not_hide_where_the_training_waits() -> None:
    """Both wait for other ranks. Where the training doesn't, the other thread is meant."""
    saves, saved, trains, trained = (held_lock() for _ in range(4))
    places = [Place("before")]

    def look(comes: Any, goes_on: Any) -> None:
        comes.acquire()
        places.append(place_here())
        if goes_on:
            goes_on.release()

    saving = in_file("torch/distributed/distributed_c10d.py", "all_gather")
    training = in_file("torch/distributed/distributed_c10d.py", "all_reduce")
    name = f"{OWN_THREADS}-of-the-test"
    with held_by(lambda: saving(saves, saved)):
        watcher = threading.Thread(target=look, args=(saves, None), name=name)
        watcher.start()
        watcher.join()
        threading.Thread(target=look, args=(trains, trained), name=name).start()
        training(trains, trained)
        saved.release()
    found = [place.exchange.split(" ")[0] for place in places]
    assert found == ["", "all_gather", "all_reduce"]


def place_in_layer(rank: int) -> Place:
    """Rank 1 comes late to layer 1's attention: where both are meanwhile."""
    model = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=2))
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()  # the first step is compared layer by layer
    places: list[Place] = []
    watcher = threading.Timer(1.0, lambda: places.append(place_here()))
    watcher.name = "longctx-watchdog-of-the-test"
    if rank == 1:
        layer = model.model.layers[1].self_attn
        layer.register_forward_pre_hook(lambda *_: time.sleep(2.0))
    watcher.start()
    model(input_ids=ids, labels=ids).loss.backward()
    watcher.join()
    handle.unpatch()
    return places[0]


def test_a_rank_that_waits_in_a_layer_says_which_and_for_whom() -> None:
    """In backward a trial of tests/faults has it."""
    waiting, sleeping = run_distributed(place_in_layer, 2)
    assert (waiting.layer, waiting.direction) == (1, "forward")
    assert waiting.exchange.startswith("attention's exchange by the plan")
    assert (waiting.waits_for, waiting.waits) == ((1,), True)
    assert sleeping.waits is False
    assert "test_places.py" in sleeping.code


def test_an_error_has_the_place_where_it_was_raised() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        model(input_ids=torch.arange(8)[None])
    place = place_of_error(caught.value)
    assert (place.direction, place.waits) == ("forward", False)
    assert "test_places.py" in place.code
