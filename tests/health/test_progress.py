"""Which limit holds when, by a clock of the test's own."""

import pytest

from longctx_patch.health.progress import Progress, TimeLimits


class Clock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def __call__(self) -> float:
        return self.time_s


def test_a_step_may_take_ten_medians_and_two_minutes_at_least() -> None:
    clock = Clock()
    progress = Progress(TimeLimits(start_s=500.0, save_s=700.0), clock)
    assert (progress.at.phase, progress.limit_s()) == ("start", 500.0)
    clock.time_s += 300  # the first step compiles, and doesn't count
    progress.done(1)
    assert (str(progress.at), progress.limit_s()) == ("step 2", 120.0)
    for step, seconds in enumerate((5, 30, 31), start=2):
        clock.time_s += seconds
        progress.done(step)
    assert progress.limit_s() == 300.0
    clock.time_s += 7
    assert progress.seconds() == 7
    progress.enter("save")
    assert (str(progress.at), progress.limit_s()) == ("saving after step 4", 700.0)
    clock.time_s += 600
    progress.enter("step")  # saving is no part of a step's time
    assert (str(progress.at), progress.seconds(), progress.limit_s()) == ("step 5", 0, 300.0)
    progress.enter("evaluate")
    assert (str(progress.at), progress.limit_s()) == ("an evaluation after step 4", 300.0)
    progress.enter("start")  # rows of another length, whose steps take another time
    assert progress.limit_s() == 500.0
    assert str(progress.at) == "the start, before the end of step 5, the first of its length"
    clock.time_s += 400
    progress.done(5)
    assert (str(progress.at), progress.limit_s()) == ("step 6", 120.0)
    progress.enter("end")
    assert (str(progress.at), progress.limit_s()) == ("the end, after step 5", 700.0)


def test_what_another_thread_does_is_said_until_it_has_ended() -> None:
    progress = Progress(TimeLimits(), Clock())
    progress.done(4)
    progress.beside("checkpoint-4 is written")
    progress.done(5)
    assert str(progress.at) == "step 6 (while checkpoint-4 is written)"
    progress.beside("")
    assert str(progress.at) == "step 6"


def test_a_given_limit_of_a_step_holds() -> None:
    progress = Progress(TimeLimits(step_s=3.0), Clock())
    progress.done(8)
    assert progress.limit_s() == 3.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("start_s", 0), ("start_s", -1), ("save_s", 0), ("step_s", -1), ("step_s", float("nan"))],
)
def test_limits_are_positive(name: str, value: float) -> None:
    flag = f"--{name.removesuffix('_s')}-timeout"
    with pytest.raises(ValueError, match=rf"{name}={value} \({flag}\): .* Give inf for no limit"):
        TimeLimits(**{name: value})
