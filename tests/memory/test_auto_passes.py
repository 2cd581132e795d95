"""What `auto` learns from unequal passes: of other lengths and loads, with foreign peaks between
them, failed, or without a backward."""

from longctx_patch.memory.auto import MEASURE
from tests.memory.simulated import LAYERS, Training, capacity_for


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


def test_a_pass_that_was_out_of_memory_counts() -> None:
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
