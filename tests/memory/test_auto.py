"""How far `auto` lets layers climb on the simulated machine, and what unequal passes teach it:
those of other lengths and loads, with foreign peaks between, failed, or without a backward."""

import random

import pytest

from longctx_patch.memory.auto import MEASURE
from longctx_patch.memory.ladder import Extra, after_climbs, measured_extra
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.passes import Rehearsed
from tests.memory.simulated import CHEAP, EXTRA, LAYERS, Training, capacity_for


def test_extra_of_each_kind_is_measured_on_one_of_it() -> None:
    kinds = ["dense", "experts", "experts", "dense", "experts", "alone"]
    kept = [90, 20, 22, 50, 80, 70]
    policies = ("attention", "attention", "attention", "none", "none", "none")
    # The first dense layer holds what others don't, so it seems to keep more than a whole layer.
    dense, experts, alone = Extra(90, 0), Extra(20, 60), Extra(0, 70)
    found = measured_extra(kinds, kept, policies)  # type: ignore[arg-type]
    assert found == (dense, experts, experts, dense, experts, alone)
    seen = measured_extra(["a"] * 4, [9, 3, 10, 90], ("offload", "offload", "attention", "none"))
    assert seen == (Extra(7, 80),) * 4
    assert measured_extra(["a"] * 2, [3, 90], ("offload", "none")) == (Extra(0, 87),) * 2


def test_all_layers_reach_a_rung_before_any_climbs_further() -> None:
    def letters(climbs: int) -> str:
        return "".join(policy[0] for policy in after_climbs(climbs, 3))

    assert [letters(n) for n in range(7)] == ["ooo", "ooa", "oaa", "aaa", "aan", "ann", "nnn"]
    assert [Extra(2, 10).of(policy) for policy in after_climbs(4, 3)] == [2, 2, 12]
    assert Extra(2, 10).of("offload") == 0


def test_layers_climb_after_one_measured_pass_and_no_higher_than_fits() -> None:
    for whole in range(LAYERS + 1):
        training = Training.on(capacity_for(max(whole, 1)))
        assert [training.train() for _ in range(4)] == [1] + [max(whole, 1)] * 3
        use = training.auto.use
        assert use is not None
        assert use.extra_bytes == (Extra(10 * CHEAP, 10 * EXTRA),) * LAYERS
        assert use.peak_bytes <= (1 - MARGIN) * use.capacity_bytes
    assert training.auto.policies == ("none",) * LAYERS


def test_what_a_rehearsal_knew_need_not_be_measured() -> None:
    """The machine has just the memory for `climbs`. They are made by the second pass, if the host
    has room for the layers that stay offloaded."""
    tokens, states = 10, 40
    costs = [tokens * CHEAP] * LAYERS + [tokens * EXTRA] * LAYERS
    lowest = 100 + states + tokens * (CHEAP + EXTRA)  # the last layer, whole or recomputed
    for host_layers in (LAYERS, 3):
        fewest = LAYERS - host_layers
        for climbs in range(max(fewest, 1), 2 * LAYERS + 1):
            if climbs == LAYERS:
                continue  # the first whole layer takes no more than its recompute did
            need = 100 + states + sum(costs[:climbs]) + tokens * EXTRA * (climbs <= LAYERS)
            training = Training.on(int((need + CHEAP) / (1 - MARGIN)) + 1, offloads=True)
            stays = tokens * CHEAP * max(0, fewest - 1)
            rehearsed = Rehearsed(
                extra_bytes=Extra(tokens * CHEAP, tokens * EXTRA),
                host_layers=host_layers,
                peak_bytes=lowest + stays,
                rest_bytes=100 + states,
            )
            training.auto.know(tokens, rehearsed)
            found = []
            for step in range(4):
                training.train(tokens)
                found.append(training.auto.policies)
                if step == 0:
                    training.step(states)
            assert training.machine.highest <= training.machine.capacity_bytes
            # The bound counts the last layer's recompute once too often.
            assert found[0].count("offload") >= found[-1].count("offload") >= LAYERS - climbs
            assert set(found[1:]) == {after_climbs(climbs, LAYERS)}, (climbs, found)
            training.train(tokens + 1)
            assert training.auto.policies[-1] == "none"  # a longer row is measured


def test_the_pass_that_measures_takes_half_of_the_margin_and_what_it_must() -> None:
    training = Training.on(int(8 * CHEAP * 10 / (MARGIN / 2)), offloads=True)
    training.backward(training.forward(10))
    assert training.auto.policies == ("attention",) * (LAYERS - 1) + ("none",)
    this = training.forward(20)
    assert training.auto.policies == (*("attention",) * 4, *("offload",) * 2, "attention", "none")
    assert training.machine.now == 100 + 20 * (5 * CHEAP + CHEAP + EXTRA)
    training.backward(this)
    squeezed = Training.on(100, offloads=True)
    squeezed.forward(10)
    assert squeezed.auto.policies == ("attention", *("offload",) * 5, "attention", "none")


def test_layers_step_down_once_where_memory_is_lost_in_pieces() -> None:
    """Layers step down after two passes in which the allocator had to retry, and stay there."""
    training = Training.on(capacity_for(5))
    training.machine.pieces = 0.2
    found, short = [], []
    for _ in range(12):
        before = training.machine.tried_again
        found.append(training.train())
        short.append(training.machine.tried_again > before)
    assert found[:3] == [1, 5, 5]
    assert found[3] < 5
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[-6:] == [found[-1]] * 6
    assert found[-1] > 0
    assert short[1]
    assert not any(short[-6:])


def test_retries_between_passes_are_not_theirs() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    for _ in range(6):
        assert training.train() == 5
        training.machine.tried_again += 1


def test_a_pass_that_was_out_of_memory_is_not_made_again() -> None:
    """After a failed allocation fewer layers are whole; gaps can end memory below the capacity."""
    training = Training.on(capacity_for(5))
    training.train()
    training.forward(10)
    assert training.whole == 5
    training.machine.now = 100
    training.machine.failed += 1
    assert training.train() < 5


def test_the_least_of_all_ranks_holds_and_measuring_is_less_than_any() -> None:
    training = Training.on(capacity_for(5))
    assert [training.train(), training.train(others=LAYERS + 2)] == [1, 2]
    assert training.train() == 5
    this = training.auto.begin(10, MEASURE)
    assert training.whole == 1
    training.auto.end(this)
    assert training.auto.use is None


def simulated(
    capacity: int,
    steps: list[list[int]],
    states: int,
    optimizer_bytes: int,
    *,
    offloads: bool,
    **needs: int,
) -> tuple[Training, int]:
    """Train on rows of these lengths, step by step; return the state and the highest memory."""
    training = Training.on(capacity, offloads=offloads, **needs)
    for number, lengths in enumerate(steps):
        for length in lengths:
            training.train(length)
        with training.machine.holding(optimizer_bytes):
            training.step(0 if number else states)
    return training, training.machine.highest


@pytest.mark.parametrize("offloads", [False, True])
def test_where_the_lowest_rung_fits_auto_fits_and_fills_the_rest(offloads: bool) -> None:
    draw = random.Random(0)
    for _ in range(60):
        needs = {
            "gradient_bytes": draw.randrange(80),
            "loss_bytes": draw.randrange(400),
            "states": draw.randrange(1000),
            "optimizer_bytes": draw.randrange(1000),
        }
        accumulation = draw.randrange(1, 4)
        steps = [[draw.choice([6, 10]) for _ in range(accumulation)] for _ in range(5)]
        steps.append([10] * 6)
        # With a capacity of 0 this is what the measuring passes need.
        _, needed = simulated(0, steps, offloads=offloads, **needs)
        least = int(needed / (1 - MARGIN)) + 10 * CHEAP
        capacity = draw.randrange(least, 4 * needed)
        training, highest = simulated(capacity, steps, offloads=offloads, **needs)
        assert highest <= capacity, (needs, steps)
        use = training.auto.use
        assert use is not None
        next_one = 10 * (EXTRA if training.auto.policies[0] != "offload" else CHEAP)
        is_full = use.peak_bytes + next_one > (1 - MARGIN) * capacity
        assert is_full or training.whole == LAYERS


def test_a_longer_row_measures_anew_and_shorter_ones_go_by_it() -> None:
    training = Training.on(capacity_for(3, tokens=20))
    assert [training.train() for _ in range(2)] == [1, 8]
    assert [training.train(20), training.train(10), training.train(20)] == [1, 3, 3]
    assert [training.train(5), training.train(20)] == [3, 3]
    assert training.machine.highest <= training.machine.capacity_bytes
    assert training.auto.use is not None
    assert training.auto.use.num_tokens == 20


def test_half_the_margin_is_left_to_passes_that_differ() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    training.train()
    peak = training.machine.peak()
    training.machine.capacity_bytes = int(peak / 0.95)  # another process took memory
    assert training.train() == 5
    training.machine.capacity_bytes = int(peak / 0.98)
    assert training.train() == 4


def test_loads_that_change_from_pass_to_pass_settle_on_the_heavy_one() -> None:
    training = Training.on(capacity_for(5))
    found = []
    for number in range(16):
        training.loss_bytes = 140 * (number % 2)
        found.append(training.train())
    assert found[-10:] == [4] * 10


def test_two_forwards_before_a_backward_share_the_memory() -> None:
    tokens = 10
    capacity = capacity_for(3, tokens=2 * tokens)
    training = Training.on(capacity)
    found = []
    for _ in range(4):
        first = training.forward(tokens)
        found.append(training.whole)
        second = training.forward(tokens)
        found.append(training.whole)
        training.backward(second)
        training.backward(first)
    assert found[0] == 1
    assert found[1] == 0  # a backward must be seen first
    assert found[2:] == [2, 2, 3, 3, 3, 3]  # layers of the first count as if whole in both
    assert training.machine.highest <= capacity


def test_a_pass_without_backward_shows_nothing() -> None:
    training = Training.on(10_000)
    this = training.forward(10)
    training.machine.now = 100
    assert training.auto.propose(10) == LAYERS
    del this  # the loss was thrown away
    assert training.auto.propose(10) == LAYERS
    assert training.train() == 0
    assert training.train() == LAYERS


def test_an_output_that_is_kept_holds_nothing_up() -> None:
    """A notebook, say, keeps the output of a first forward; later passes are measured anyway."""
    training = Training.on(10_000)
    kept = training.forward(10)
    assert [training.train() for _ in range(3)] == [0, LAYERS, LAYERS]
    assert kept.num_tokens == 10


def test_a_forward_that_failed_is_measured_again() -> None:
    training = Training.on(10_000)
    training.auto.begin(10, training.auto.propose(10))
    training.auto.run(0, lambda: training.machine.hold(20))
    assert training.auto.use is None
    assert training.auto.propose(10) == MEASURE
    assert [training.train() for _ in range(2)] == [1, LAYERS]
