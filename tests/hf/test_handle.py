"""Plans of the next batch are made beside the step; whoever copies a patched model is told what to
do instead."""

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from longctx_patch import LongContextConfig, patch
from longctx_patch.hf.handle import ahead
from longctx_patch.plans.generators.setting import Setting
from tests.harness import run_distributed
from tests.hf.tiny import VOCABULARY, tiny_model
from tests.memory.trained import Trained


def test_each_batch_is_prepared_in_a_thread_before_the_ahead_of_it_is_done() -> None:
    prepared: list[int] = []
    threads = set()

    def prepare(batch: int) -> None:
        prepared.append(batch)
        threads.add(threading.current_thread())

    seen = []
    for batch in ahead(range(4), prepare):
        assert batch in prepared
        seen.append(batch)
    assert seen == prepared == [0, 1, 2, 3]
    assert threading.main_thread() not in threads
    assert list(ahead([], prepare)) == []


def test_depth_is_how_many_batches_are_prepared_ahead() -> None:
    prepared: list[int] = []
    batches = ahead(range(5), prepared.append, depth=3)
    assert next(batches) == 0
    assert list(batches) == [1, 2, 3, 4]
    assert prepared == list(range(5))
    with pytest.raises(ValueError, match="depth=0"):
        next(ahead([1], prepared.append, depth=0))


def test_what_goes_wrong_is_raised_with_its_batch() -> None:
    def prepare(batch: int) -> None:
        if batch == 2:
            raise ValueError("batch 2 is bad")

    batches = ahead(range(4), prepare)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2 is bad"):
        next(batches)


def plans_made_in_steps(rank: int) -> list[int]:
    """How many plans each step made in the main thread, not beside it."""
    in_steps = [0]
    schedule = Setting.schedule

    def counted(*args: Any) -> Any:
        in_steps[-1] += threading.current_thread() is threading.main_thread()
        return schedule(*args)

    Setting.schedule = counted  # type: ignore[method-assign, assignment]
    it = Trained(tiny_model(), ring_degree=2)

    def batches() -> Any:
        for number in range(4):
            lengths = [3 + number, 7, 20 - number, 9]
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(VOCABULARY, (sum(lengths),), generator=generator)
            yield it.collate([{"input_ids": ids, "seq_lengths": lengths}])

    for batch in it.handle.plan_ahead(batches()):
        it.model(**batch).loss.backward()
        in_steps.append(0)
    return in_steps[:-1]


def test_packed_steps_find_their_plans_made() -> None:
    """They do from the third step on: only the first step shows which layers there are."""
    for made in run_distributed(plans_made_in_steps, 2):
        assert made == [2, 2, 0, 0]


def spawn(given: Any) -> None:
    """A process that is not forked gets its arguments by pickle."""
    multiprocessing.get_context("spawn").Process(target=print, args=(given,)).start()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda given: torch.save(given, io.BytesIO()),
    "spawn": spawn,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("wrap", [None, nn.Sequential, "peft"])
def test_a_patched_model_is_not_copied(how: str, wrap: Any) -> None:
    model: Any = tiny_model()
    whole = (
        model if wrap != "peft" else get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    )
    handle = patch(whole, LongContextConfig())
    whole = nn.Sequential(model) if wrap is nn.Sequential else whole
    message = r"can't be copied or pickled: .* before patch\(\) .*model.state_dict\(\)"
    for given in (whole, handle):
        with pytest.raises(ValueError, match=message):
            COPIES[how](given)
    torch.save(whole.state_dict(), io.BytesIO())
    handle.unpatch()
    if how != "spawn":
        COPIES[how](whole)
