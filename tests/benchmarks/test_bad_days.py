"""What checkpoints take of a run's time, from when its steps and its saves began and ended."""

from itertools import accumulate

import bad_days
import pytest

EVERY = 10


def clock_of(
    num_steps: int,
    *,
    waits_s: float = 0.5,
    first_waits_s: float = 0.5,
    slower_s: float = 0.25,
    num_slower: int,
) -> bad_days.Clock:
    """Steps of 1 s, after quicker first ones; saves wait, and steps beside writing are slower."""
    clock, now = bad_days.Clock(), 0.0
    for number in range(num_steps):
        clock.starts.append(now)
        since = number - (EVERY - 1)
        if since >= 0 and since % EVERY == 0:
            waited = waits_s if since else first_waits_s
            clock.spans["save"].append((now, now + waited))
            now += waited
            clock.spans["write"].append((now, now + num_slower * (1 + slower_s)))
        is_slower = since >= 0 and since % EVERY < num_slower
        now += 0.8 if since < 0 else 1 + slower_s * is_slower
    return clock


def test_what_is_lost_is_told_from_steps_after_the_first_save() -> None:
    """Not from the first steps, in which a cool GPU is faster."""
    clock = clock_of(3 * EVERY + 4, waits_s=0.5, first_waits_s=2, slower_s=0.25, num_slower=4)
    found = bad_days.lost_to_saving(clock, EVERY)
    assert found["quiet_s"] == pytest.approx(1)
    assert found["lost_s"] == pytest.approx([2 + 4 * 0.25, 0.5 + 4 * 0.25])
    assert found["lost"] == pytest.approx((3 + 1.5) / 20)
    assert found["num_quiet"] == 2 * (EVERY - 4)


@pytest.mark.parametrize(("num_steps", "num_slower"), [(3 * EVERY, EVERY), (EVERY + 4, 2)])
def test_without_quiet_steps_or_whole_intervals_nothing_is_told(
    num_steps: int, num_slower: int
) -> None:
    clock = clock_of(num_steps, num_slower=num_slower)
    with pytest.raises(SystemExit, match=r"--save-every 10: .* save less often"):
        bad_days.lost_to_saving(clock, EVERY)


def test_guards_are_not_judged_by_steps_before_clocks_have_settled() -> None:
    guarded, plain, warm_up = ([seconds] * bad_days.BLOCK for seconds in (1.1, 1.0, 0.8))
    steps = [*warm_up, *warm_up, *guarded, *plain, *guarded, *plain]
    clock = bad_days.Clock(starts=[0.0, *accumulate(steps)])
    with_s, without_s = bad_days.by_kind(clock)
    assert (with_s, without_s) == (pytest.approx(1.1), pytest.approx(1.0))


def test_too_few_steps_to_judge_guards() -> None:
    clock = bad_days.Clock(starts=[float(number) for number in range(3 * bad_days.BLOCK)])
    with pytest.raises(SystemExit, match=r"--steps 30: .* 43 or more"):
        bad_days.by_kind(clock)
