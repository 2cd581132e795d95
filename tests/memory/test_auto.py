"""How `auto` decides, on a machine whose memory is a sum: no tensors, no device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from longctx_patch.memory.auto import (
    MARGIN,
    MEASURE,
    AutoPolicy,
    Extra,
    Pass,
    after_climbs,
    measured_extra,
)
from longctx_patch.memory.offload import HostCopies

LAYERS = 8
CHEAP, EXTRA = 2, 10
"""Bytes for each token that a layer keeps under `attention`, and beyond it under `none`."""
KEPT = {"offload": 0, "attention": CHEAP, "none": CHEAP + EXTRA}


@dataclass
class Machine:
    """A `Meter`."""

    total: int
    now: int = 0
    top: int = 0
    highest: int = 0
    """The peak that nobody resets."""

    def hold(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.top = max(self.top, self.now)
        self.highest = max(self.highest, self.now)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        self.hold(num_bytes)
        yield
        self.now -= num_bytes

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.top

    def reset_peak(self) -> None:
        self.top = self.now

    def capacity(self) -> int:
        return self.total


@dataclass
class Training:
    """Passes of a model with alike layers on one machine."""

    machine: Machine
    auto: AutoPolicy
    loss_bytes: int = 0
    """Held while the loss is computed, when all activations are alive."""
    gradient_bytes: int = 0
    """Of a layer; it stays after the first backward, until `step`."""
    gradients: int = 0
    """Bytes of them that are alive."""

    @classmethod
    def on(cls, capacity: int, *, offloads: bool = False, **needs: int) -> "Training":
        machine = Machine(capacity)
        machine.hold(100)  # weights
        host = HostCopies(torch.device("cpu")) if offloads else None
        return cls(machine, AutoPolicy(machine, ["layer"] * LAYERS, host), **needs)

    @property
    def whole(self) -> int:
        return self.auto.policies.count("none")

    def forward(self, tokens: int, *, others: int = MEASURE) -> Pass:
        """`others`: what another rank proposes, if not to do as this one."""
        proposed = self.auto.propose(tokens)
        this = self.auto.begin(tokens, proposed if others == MEASURE else min(proposed, others))
        for layer in range(LAYERS):
            self.auto.run(layer, partial(self.compute, tokens, layer), torch.zeros(1))
        with self.machine.holding(self.loss_bytes):
            return this

    def per_token(self, layer: int) -> int:
        return KEPT[self.auto.policies[layer]]

    def compute(self, tokens: int, layer: int, _: torch.Tensor) -> None:
        self.machine.hold(tokens * self.per_token(layer))

    def backward(self, this: Pass) -> None:
        for layer in reversed(range(LAYERS)):
            again = KEPT["none"] - self.per_token(layer)
            with self.machine.holding(again * this.num_tokens):
                if self.gradients < self.gradient_bytes * LAYERS:
                    self.machine.hold(self.gradient_bytes)
                    self.gradients += self.gradient_bytes
            self.machine.now -= this.num_tokens * self.per_token(layer)
        self.auto.end(this)

    def train(self, tokens: int = 10, *, others: int = MEASURE) -> int:
        """One pass; the number of layers that were whole in it."""
        self.backward(self.forward(tokens, others=others))
        return self.whole

    def step(self, states: int = 0) -> None:
        """The optimizer's, which makes its states in the first."""
        self.machine.hold(states - self.gradients)
        self.gradients = 0


def capacity_for(whole: int, *, tokens: int = 10, besides: int = 100) -> int:
    """That fits so many whole layers and a byte less than one more."""
    need = besides + tokens * (CHEAP * LAYERS + EXTRA * whole)
    return int((need + tokens * EXTRA - 1) / (1 - MARGIN)) - 1


def test_extra_of_each_kind_is_measured_on_one_of_it() -> None:
    kinds = ["dense", "experts", "experts", "dense", "experts", "alone"]
    kept = [90, 20, 22, 50, 80, 70]
    policies = ("attention", "attention", "attention", "none", "none", "none")
    # The first dense layer holds what others don't, so it seems to keep more than a whole one.
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


def test_without_room_every_layer_is_recomputed() -> None:
    training = Training.on(100)
    assert [training.train() for _ in range(3)] == [1, 0, 0]
    assert set(training.auto.policies) == {"attention"}


def test_with_a_host_layers_leave_where_attention_does_not_fit() -> None:
    """Every number of climbs, on the machine that just has the memory for it."""
    tokens = 10
    costs = [tokens * CHEAP] * LAYERS + [tokens * EXTRA] * LAYERS
    # From as much as the pass that measures needs. The first whole layer takes no more than its
    # recompute did.
    for climbs in (*range(4, LAYERS), *range(LAYERS + 1, 2 * LAYERS + 1)):
        # One layer is recomputed at a time, whose memory the whole layers after it have left.
        need = 100 + sum(costs[:climbs]) + (tokens * EXTRA if climbs <= LAYERS else 0)
        training = Training.on(int((need + CHEAP) / (1 - MARGIN)) + 1, offloads=True)
        for _ in range(8):
            training.train(tokens)
        assert training.machine.highest <= training.machine.total
        found = training.auto.policies
        assert found == after_climbs(climbs, LAYERS), (climbs, found)


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


def test_states_of_the_optimizer_are_counted_before_any_pass_meets_them() -> None:
    """With accumulation the first passes see none; layers climb, and step down in time."""
    states, gradients = 300, 20 * LAYERS
    capacity = capacity_for(3, besides=100 + states + gradients)
    training = Training.on(capacity, gradient_bytes=20)
    early = [training.train() for _ in range(3)]
    assert early[0] == 1
    assert early[1:] == [6, 6]  # 300 bytes are three layers
    for _ in range(4):
        training.step(states)
        states = 0
        late = [training.train() for _ in range(3)]
    assert late == [3] * 3
    assert training.machine.highest <= capacity


def test_a_longer_row_measures_anew_and_shorter_ones_go_by_it() -> None:
    training = Training.on(capacity_for(3, tokens=20))
    assert [training.train() for _ in range(2)] == [1, 8]
    assert [training.train(20), training.train(10), training.train(20)] == [1, 3, 3]
    assert [training.train(5), training.train(20)] == [3, 3]
    assert training.machine.highest <= training.machine.total
    assert training.auto.use is not None
    assert training.auto.use.num_tokens == 20


def test_shorter_rows_alone_show_no_room() -> None:
    """After a change of policies, only a longest pass says what such passes need."""
    training = Training.on(capacity_for(5))
    assert [training.train() for _ in range(2)] == [1, 5]
    training.train(1, others=LAYERS + 2)
    assert [training.train(1) for _ in range(3)] == [2, 2, 2]
    assert [training.train(10), training.train(1)] == [2, 5]


def test_a_pass_that_needs_more_than_those_before_makes_layers_step_down() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    training.train()
    training.loss_bytes = 140  # other documents, say
    assert training.train() == 5
    assert training.train() == 4
    assert training.machine.peak() <= training.machine.total


def test_half_the_margin_is_left_to_passes_that_differ() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    training.train()
    peak = training.machine.peak()
    training.machine.total = int(peak / 0.95)  # another process has taken some
    assert training.train() == 5
    training.machine.total = int(peak / 0.98)
    assert training.train() == 4


def test_where_the_peak_is_not_in_the_layers_more_climb_later() -> None:
    """Gradients pile up when activations are gone, so the first bound is too high."""
    training = Training.on(1100, gradient_bytes=60)
    found = []
    for _ in range(6):
        found.append(training.train())
        training.step()
    assert found == sorted(found)
    assert found[1] < found[-1]
    assert training.machine.highest <= training.machine.total


def test_peaks_outside_of_training_passes_do_not_count() -> None:
    training = Training.on(capacity_for(5))
    found = []
    for _ in range(4):
        found.append(training.train())
        with training.machine.holding(5000):  # an evaluation, the optimizer
            pass
        training.step()
    assert found == [1, 5, 5, 5]


def test_an_evaluation_before_shorter_rows_is_no_peak_of_theirs() -> None:
    training = Training.on(2000)
    found = []
    for number in range(10):
        found.append(training.train(6 if number % 2 else 10))
        with training.machine.holding(1970 - training.machine.now):
            pass
    assert found == [1] + [LAYERS] * 9


def test_loads_that_change_from_pass_to_pass_settle_on_the_heavy_one() -> None:
    training = Training.on(capacity_for(5))
    found = []
    for number in range(16):
        training.loss_bytes = 140 * (number % 2)
        found.append(training.train())
    assert found[-10:] == [4] * 10


def test_a_pass_that_was_out_of_memory_counts() -> None:
    """Whose step was skipped, and the next heavy one fits."""
    training = Training.on(capacity_for(8))
    assert [training.train() for _ in range(3)] == [1, 8, 8]
    training.loss_bytes = 60
    training.forward(10)  # no backward: what it held is given back
    training.machine.top = training.machine.total
    training.machine.now = 100
    assert training.train() < 8
    assert training.machine.highest <= training.machine.total


def test_others_may_reset_the_peak_between_passes() -> None:
    training = Training.on(capacity_for(5))
    found = []
    for _ in range(4):
        found.append(training.train())
        training.machine.reset_peak()
    assert found == [1, 5, 5, 5]


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
    assert found[1] == 0  # not before a backward was seen
    assert found[2:] == [2, 2, 3, 3, 3, 3]  # what the first had whole counts as if both had
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
    """In a notebook, say, whose first forward was a look at the model."""
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
    """After training on rows of these lengths, step by step, and the most memory it took."""
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
        # Without memory to spare, what the passes that measure need.
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
