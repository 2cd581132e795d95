"""Steps of several forwards: what each of them takes anew, and what lives from one to the next."""

from dataclasses import replace

import pytest

from longctx_patch.planner.job import nearest_multiples
from longctx_patch.planner.search import Result
from longctx_patch.planner.step_memory import states
from tests.planner.jobs import llama_job, result_of

ONCE = ("optimizer", "idle")
"""Parts of a step that come once, whatever the number of its forwards."""


def step(rows: int | None, *, lora: bool = False, states_on_host: bool = False) -> Result:
    """Two GPUs share each of two rows at once."""
    job = llama_job("4xH200", 2**16, lora=lora, rows_per_step=rows)
    return result_of(
        job, ulysses=2, ring=1, checkpoint="none", offload_states=states_on_host, mlp_tiles=2
    )


@pytest.mark.parametrize("states_on_host", [False, True])
def test_each_forward_takes_its_time_and_the_optimizer_steps_once(states_on_host: bool) -> None:
    one, three = (step(rows, states_on_host=states_on_host) for rows in (2, 6))
    assert (one.rows_at_once, one.forwards, three.forwards) == (2, 1, 3)
    for name, seconds in one.time.parts().items():
        times = 1 if name in ONCE else 3
        assert three.time.parts()[name] == pytest.approx(times * seconds), name
    assert one.time.fsdp > 0  # weights are gathered for each forward
    assert three.tokens_per_second_per_gpu > one.tokens_per_second_per_gpu
    tokens = 6 * 2**16 / 4
    assert three.tokens_per_second_per_gpu == pytest.approx(tokens / three.time.total)
    assert three.mfu / one.mfu == pytest.approx(3 * one.time.total / three.time.total)


@pytest.mark.parametrize("lora", [False, True])
def test_sharded_gradients_live_between_the_forwards(lora: bool) -> None:
    """With every layer kept, most is held at the loss, where one forward has the head's only."""
    one, two, four = (step(rows, lora=lora) for rows in (2, 4, 8))
    _, gradients, _ = states(one.job)
    assert two.memory.total - one.memory.total == pytest.approx(gradients)
    assert two.memory.gradients - one.memory.gradients == pytest.approx(gradients)
    assert four.memory == two.memory


def test_gradients_on_the_host_take_nothing_of_the_gpu() -> None:
    one, two = (step(rows, states_on_host=True) for rows in (2, 4))
    assert (one.memory, one.host_bytes) == (two.memory, two.host_bytes)


def test_rows_at_once_are_a_step_where_none_are_named() -> None:
    unnamed, named = step(None), step(2)
    assert (unnamed.num_rows, unnamed.forwards) == (named.num_rows, named.forwards) == (2, 1)
    assert (unnamed.memory, unnamed.time) == (named.memory, named.time)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows_per_step=5 with 2 rows at once: .* Use 4 or 6\."):
        step(5)
    with pytest.raises(ValueError, match=r"rows_per_step=0: it must be 1 or more"):
        replace(step(2).job, rows_per_step=0)
    assert (nearest_multiples(3, 4), nearest_multiples(9, 4)) == ("4", "8 or 12")
