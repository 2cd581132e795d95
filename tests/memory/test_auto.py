"""How far `auto` lets layers climb on the simulated machine, and what unequal passes teach it:
those of other lengths and loads, with foreign peaks between, failed, or without a backward."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from longctx_patch.memory.auto import MEASURE, AutoPolicy
from longctx_patch.memory.ladder import RECENT, Extra, Pass, Rehearsed, after_climbs, measured_extra
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.offload import HostCopies
from tests.memory.live_bytes import Counts

LAYERS = 8
CHEAP, EXTRA = 2, 10
"""Bytes per token that a layer keeps under `attention`, and that `none` adds to them."""
KEPT = {"offload": 0, "attention": CHEAP, "none": CHEAP + EXTRA}


@dataclass
class Machine(Counts):
    highest: int = 0
    """The peak since the start, which is never reset."""
    pieces: float = 0.0
    """Share of the capacity that fragmentation takes."""

    def hold(self, num_bytes: int) -> None:
        super().hold(num_bytes)
        self.tried_again += self.now > (1 - self.pieces) * self.capacity_bytes
        self.highest = max(self.highest, self.now)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        self.hold(num_bytes)
        yield
        self.now -= num_bytes


@dataclass
class Training:
    """Passes of a model with equal layers on one machine."""

    machine: Machine
    auto: AutoPolicy
    loss_bytes: int = 0
    """Bytes held while the loss is computed, when all activations are alive."""
    gradient_bytes: int = 0
    """Bytes of one layer's gradients, which stay from the first backward until `step`."""
    gradients: int = 0
    """Bytes of gradients that are alive."""

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
        """`others`: the number of climbs that another rank proposes (default: the same)."""
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
        """Run one pass; return how many layers were whole (`none`) in it."""
        self.backward(self.forward(tokens, others=others))
        return self.whole

    def step(self, states: int = 0) -> None:
        """The optimizer's step: makes states of this many bytes and frees gradients."""
        self.machine.hold(states - self.gradients)
        self.gradients = 0


def capacity_for(whole: int, *, tokens: int = 10, besides: int = 100) -> int:
    """A capacity for `whole` whole layers that is a byte too small for one more."""
    need = besides + tokens * (CHEAP * LAYERS + EXTRA * whole)
    return int((need + tokens * EXTRA - 1) / (1 - MARGIN)) - 1


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


def test_with_a_host_layers_leave_where_attention_does_not_fit() -> None:
    """`auto` ends with each number of climbs on the machine with just the memory for it."""
    tokens = 10
    costs = [tokens * CHEAP] * LAYERS + [tokens * EXTRA] * LAYERS
    # The least is what the measuring pass needs. LAYERS climbs are left out, because the first
    # whole layer takes no more than its recompute did.
    for climbs in (*range(4, LAYERS), *range(LAYERS + 1, 2 * LAYERS + 1)):
        # One layer is recomputed at a time, in the memory that whole layers after it have freed.
        need = 100 + sum(costs[:climbs]) + (tokens * EXTRA if climbs <= LAYERS else 0)
        training = Training.on(int((need + CHEAP) / (1 - MARGIN)) + 1, offloads=True)
        for _ in range(8):
            training.train(tokens)
        assert training.machine.highest <= training.machine.capacity_bytes
        found = training.auto.policies
        assert found == after_climbs(climbs, LAYERS), (climbs, found)


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


@pytest.mark.parametrize("too_much", [0, 100, 200, 300])
def test_a_rehearsal_that_was_too_careful_holds_for_one_pass(too_much: int) -> None:
    """From the second pass on the policies are right, even if the first has the rehearsed ones."""
    extra = Extra(10 * CHEAP, 10 * EXTRA)
    expected = 100 + LAYERS * 10 * CHEAP + 10 * EXTRA + too_much
    training = Training.on(capacity_for(4), offloads=True)
    found = Rehearsed(extra_bytes=extra, host_layers=0, peak_bytes=expected, rest_bytes=100)
    training.auto.know(10, found)
    assert [training.train() for _ in range(5)][1:] == [4] * 4


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


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_single_retry_changes_nothing(at_once: int) -> None:
    """This holds even if the pass with the retry ends several times or others are open."""
    found = []
    for retries in (0, 1):
        training, whole = Training.on(capacity_for(5)), []
        training.train()
        for _ in range(4):
            passes = [training.forward(10) for _ in range(at_once)]
            training.machine.tried_again += retries
            for this in (*reversed(passes), passes[0]):
                training.auto.end(this)
            training.machine.now = 100
            whole += [training.train() for _ in range(RECENT)]
        found.append(whole)
    assert found[0] == found[1]
    assert found[0][-1] > 0


def test_retries_of_every_other_pass_count() -> None:
    """Only every other pass retries: one that meets gradients, or the longer of two lengths."""
    for lengths in ((10, 10), (10, 7)):
        training = Training.on(capacity_for(5))
        training.train()
        found = []
        for number in range(40):
            this = training.forward(lengths[number % 2])
            if number % 2 and training.whole > 3:
                training.machine.tried_again += 1
            training.backward(this)
            found.append(training.whole)
        assert found[-20:] == [found[-1]] * 20
        assert 1 <= found[-1] <= 4


def test_a_peak_of_something_else_hides_no_retries() -> None:
    training = Training.on(capacity_for(5))
    training.machine.pieces = 0.2
    for _ in range(8):
        training.train()
        with training.machine.holding(training.machine.capacity_bytes):
            pass  # an evaluation, say
    short = training.machine.tried_again
    for _ in range(4):
        training.train()
    assert training.machine.tried_again == short
    assert training.whole > 0


def test_retries_between_passes_are_not_theirs() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    for _ in range(6):
        assert training.train() == 5
        training.machine.tried_again += 1


@pytest.mark.parametrize("fill", [0.7, 1.0])
def test_states_count_once_where_shorter_rows_meet_them(fill: float) -> None:
    """The longest row came before the optimizer made its states, shorter rows after it."""
    training = Training.on(1600 if fill == 1.0 else 2100)
    training.machine.fill = fill
    assert [training.train(10) for _ in range(2)] == [1, LAYERS]
    training.step(400)
    assert [training.train(9) for _ in range(6)] == [LAYERS] * 6
    use = training.auto.use
    assert use is not None
    assert use.peak_bytes <= use.capacity_bytes


def test_what_stays_leaves_no_gaps() -> None:
    """With segments of fixed size, gaps are expected only in memory that isn't held all along."""
    training = Training.on(1000)
    training.machine.fill = 0.7
    training.machine.hold(640)
    for _ in range(4):
        training.train(1)
    assert training.whole == LAYERS
    assert training.auto.use is not None
    assert training.auto.use.capacity_bytes == 740 + 182


def test_a_pass_that_was_out_of_memory_is_not_made_again() -> None:
    """After a failed allocation fewer layers are whole; gaps can end memory below the capacity."""
    training = Training.on(capacity_for(5))
    training.train()
    training.forward(10)
    assert training.whole == 5
    training.machine.now = 100
    training.machine.failed += 1
    assert training.train() < 5


def test_a_loss_that_is_thrown_away_was_not_out_of_memory() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    training.forward(10)
    training.machine.now = 100
    training.machine.tried_again += 1
    assert [training.train() for _ in range(3)] == [5] * 3


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


def test_shorter_rows_alone_show_no_room() -> None:
    """After a change of policies, only a pass of the longest row shows what such rows need."""
    training = Training.on(capacity_for(5))
    assert [training.train() for _ in range(2)] == [1, 5]
    training.train(1, others=LAYERS + 2)
    assert [training.train(1) for _ in range(3)] == [2, 2, 2]
    assert [training.train(10), training.train(1)] == [2, 5]


def test_half_the_margin_is_left_to_passes_that_differ() -> None:
    training = Training.on(capacity_for(5))
    training.train()
    training.train()
    peak = training.machine.peak()
    training.machine.capacity_bytes = int(peak / 0.95)  # another process took memory
    assert training.train() == 5
    training.machine.capacity_bytes = int(peak / 0.98)
    assert training.train() == 4


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


def test_a_peak_that_was_out_of_memory_counts() -> None:
    """After a pass ran out of memory and its step was skipped, the next heavy pass fits."""
    training = Training.on(capacity_for(8))
    assert [training.train() for _ in range(3)] == [1, 8, 8]
    training.loss_bytes = 60
    training.forward(10)  # without a backward; its memory is freed
    training.machine.top = training.machine.capacity_bytes
    training.machine.now = 100
    assert training.train() < 8
    assert training.machine.highest <= training.machine.capacity_bytes


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
