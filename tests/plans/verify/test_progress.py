"""Right programs give no complaint; each planted fault gives the one that names it."""

from random import Random
from re import findall

import pytest

from longctx_patch.plans import (
    Block,
    Direction,
    Operand,
    Plan,
    RankStep,
    Transfer,
    make_schedule,
)
from longctx_patch.plans.generators.table import PLANS, plan_for
from longctx_patch.plans.verify.progress import MAX_NAMED, check_progress
from longctx_patch.sequence.layout import Interval, Rows, make_layout
from longctx_patch.sequence.masks import causal
from tests.counting import count_calls

Programs = list[list[RankStep]]
IDLE = RankStep((), (), ())


def make_plan(name: str, num_ranks: int, direction: Direction = Direction.FORWARD) -> Plan:
    layout = make_layout(PLANS[name].layouts[0], 16 * num_ranks, ring=num_ranks)
    schedule = make_schedule(
        plan_for(name, direction, "zigzag"),
        direction,
        layout,
        causal(layout.num_tokens),
        num_kv_heads=8,
        ranks_per_node=2,
    )
    return schedule.plan()


def programs_of(name: str, num_ranks: int, direction: Direction = Direction.FORWARD) -> Programs:
    return [list(steps) for steps in make_plan(name, num_ranks, direction).rank_steps]


def message(source: int, destination: int, number: int = 0) -> Transfer:
    """One that differs from others of the link in its rows."""
    rows = Rows((Interval(number, number + 1),))
    return Transfer(source, destination, Block(Operand.KV, source, rows), 0)


def send(*transfers: Transfer) -> RankStep:
    return RankStep(transfers, (), ())


def receive(*transfers: Transfer) -> RankStep:
    return RankStep((), transfers, ())


def test_nothing_to_send_is_right() -> None:
    assert check_progress(programs_of("ring", 1)) == []
    assert check_progress([[], [IDLE]]) == []


def test_ranks_may_be_steps_apart() -> None:
    """The ends of a message need not be in the same step, nor programs of the same length."""
    late = message(0, 1)
    assert check_progress([[send(late)], [IDLE, IDLE, receive(late)]]) == []


@pytest.mark.parametrize("name", ["ring", "zigzag_direct", "burst"])
def test_a_dropped_receive_is_named(name: str) -> None:
    programs = programs_of(name, 4, Direction.BACKWARD)
    dropped, *kept = programs[2][1].receives
    programs[2][1] = programs[2][1]._replace(receives=tuple(kept))
    assert check_progress(programs) == [
        f"match: step 1: rank {dropped.source} sends what rank 2 has no receive for: {dropped}"
    ]


@pytest.mark.parametrize("name", ["ring", "zigzag_direct", "burst"])
def test_a_dropped_send_is_named(name: str) -> None:
    programs = programs_of(name, 4, Direction.BACKWARD)
    dropped, *kept = programs[2][1].sends
    programs[2][1] = programs[2][1]._replace(sends=tuple(kept))
    assert check_progress(programs) == [
        f"match: step 1: rank {dropped.destination} receives what rank 2 has no send for: {dropped}"
    ]


def test_a_transfer_that_is_received_less_often_than_sent() -> None:
    again = message(0, 1)
    assert check_progress([[send(again), send(again)], [receive(again)]]) == [
        f"match: step 1: rank 0 sends what rank 1 has no receive for: {again}"
    ]


def test_a_message_to_nobody_is_named() -> None:
    lost = message(0, 9)
    assert check_progress([[send(lost)], []]) == [
        f"match: step 0: rank 0 sends what rank 9 has no receive for: {lost}"
    ]


def test_messages_swapped_within_a_step_are_named() -> None:
    """Backward of the ring sends keys and a sum over the same link in one step."""
    programs = programs_of("ring", 4, Direction.BACKWARD)
    step = programs[2][2]
    keys, sums = step.receives
    programs[2][2] = step._replace(receives=(sums, keys))
    assert check_progress(programs) == [
        f"order: message 2 from rank 1 to rank 2 is sent in step 2 as {keys}, "
        f"but received in step 2 as {sums}"
    ]


def test_messages_swapped_between_steps_are_named() -> None:
    programs = programs_of("ring", 4)
    first, second = programs[2][0], programs[2][1]
    programs[2][0] = first._replace(sends=second.sends)
    programs[2][1] = second._replace(sends=first.sends)
    assert check_progress(programs) == [
        f"order: message 0 from rank 2 to rank 3 is sent in step 0 as {second.sends[0]}, "
        f"but received in step 0 as {first.sends[0]}"
    ]


def test_ends_of_different_transfers_are_named() -> None:
    sent, received = message(0, 1, 5), message(0, 1, 6)
    assert check_progress([[send(sent)], [IDLE, receive(received)]]) == [
        f"order: message 0 from rank 0 to rank 1 is sent in step 0 as {sent}, "
        f"but received in step 1 as {received}"
    ]


def test_one_rank_with_two_steps_swapped_stops_everybody() -> None:
    """Step `s` of the direct ring sends `s + 1` ranks on: each link is used once, so the order
    within links stays right while rank 1 waits for its neighbours' last step in its first."""
    programs = programs_of("zigzag_direct", 4)
    programs[1][0], programs[1][2] = programs[1][2], programs[1][0]
    complaints = check_progress(programs)
    assert sorted(complaints) == [
        "deadlock: rank 0 waits in step 0 for rank 1, which posts that message in step 2 "
        "and waits in step 0 for rank 0",
        "deadlock: rank 1 waits in step 0 for rank 0, which posts that message in step 2 "
        "and waits in step 0 for rank 1",
        "deadlock: rank 2 waits in step 0 for rank 1, which posts that message in step 2 "
        "and waits in step 0 for rank 0",
        "deadlock: rank 3 waits in step 1 for rank 1, which posts that message in step 1 "
        "and waits in step 0 for rank 0",
    ]


def test_a_circle_of_three_ranks_is_named() -> None:
    """Each sends before it receives, in steps of their own; rank 0 only waits for the circle."""
    outside, *circle = message(1, 0), message(1, 2), message(2, 3), message(3, 1)
    programs = [
        [receive(outside)],
        [IDLE, send(circle[0]), receive(circle[2]), send(outside)],
        [send(circle[1]), receive(circle[0])],
        [IDLE, IDLE, send(circle[2]), receive(circle[1])],
    ]
    complaints = check_progress(programs)
    assert sorted(complaints[:3]) == [
        "deadlock: rank 1 waits in step 1 for rank 2, which posts that message in step 1 "
        "and waits in step 0 for rank 3",
        "deadlock: rank 2 waits in step 0 for rank 3, which posts that message in step 3 "
        "and waits in step 2 for rank 1",
        "deadlock: rank 3 waits in step 2 for rank 1, which posts that message in step 2 "
        "and waits in step 1 for rank 2",
    ]
    assert complaints[3:] == [
        "deadlock: rank 0 waits in step 0 for rank 1, which posts that message in step 3 "
        "and waits in step 1 for rank 2"
    ]


def test_only_a_few_of_many_stuck_ranks_are_named() -> None:
    ranks = range(7)
    around = [message(rank, (rank + 1) % 7) for rank in ranks]
    complaints = check_progress([[send(around[rank]), receive(around[rank - 1])] for rank in ranks])
    assert len(complaints) == MAX_NAMED + 1
    assert complaints[-1] == f"deadlock: {7 - MAX_NAMED} more of 7 ranks are stuck"


def random_programs(random: Random, num_ranks: int = 4, num_messages: int = 16) -> Programs:
    """Matched and in order; on some links all receives are a step later than their sends."""
    num_steps = 6
    links = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    delays = {link: random.randrange(2) for link in links}
    programs = [[IDLE] * (num_steps + 1) for _ in range(num_ranks)]
    for number, step in enumerate(sorted(random.choices(range(num_steps), k=num_messages))):
        source, destination = link = random.choice(links)
        transfer, later = message(source, destination, number), step + delays[link]
        sender, receiver = programs[source][step], programs[destination][later]
        programs[source][step] = sender._replace(sends=(*sender.sends, transfer))
        programs[destination][later] = receiver._replace(receives=(*receiver.receives, transfer))
    return programs


def posted(programs: Programs, at: list[int], rank: int, transfer: Transfer) -> bool:
    """Whether a rank that is at step `at[rank]` has posted its end."""
    return any(transfer in (*s.sends, *s.receives) for s in programs[rank][: at[rank] + 1])


def run(programs: Programs) -> list[int]:
    """The step at which each rank stops: one after another goes on, until none can."""
    at = [0] * len(programs)

    def can_go_on(rank: int) -> bool:
        if at[rank] == len(programs[rank]):
            return False
        step = programs[rank][at[rank]]
        peers = [(t.destination, t) for t in step.sends] + [(t.source, t) for t in step.receives]
        return all(posted(programs, at, peer, transfer) for peer, transfer in peers)

    while movable := [rank for rank in range(len(programs)) if can_go_on(rank)]:
        at[movable[0]] += 1
    return at


def test_deadlocks_are_those_of_running_the_programs() -> None:
    num_stuck = 0
    for seed in range(200):
        programs = random_programs(Random(seed))
        complaints = check_progress(programs)
        at = run(programs)
        stuck = {rank: step for rank, step in enumerate(at) if step < len(programs[rank])}
        found = [[int(number) for number in findall(r"\d+", line)] for line in complaints]
        assert {rank: step for rank, step, *_ in found} == stuck, f"seed {seed}"
        for rank, step, peer, peer_step, peer_stopped, _ in found:
            assert peer_stopped == at[peer] < peer_step
            ends = {*programs[rank][step].sends, *programs[rank][step].receives}
            later = programs[peer][peer_step]
            assert ends & {*later.sends, *later.receives}, f"seed {seed}: no such message"
        num_stuck += bool(stuck)
    assert 40 < num_stuck < 160, "the programs should be of both kinds"


def test_checking_takes_a_constant_number_of_calls_for_each_message() -> None:
    def calls_per_message(num_ranks: int) -> float:
        programs = make_plan("ring", num_ranks, Direction.BACKWARD).rank_steps
        num_messages = sum(len(step.sends) for program in programs for step in program)
        return count_calls(lambda: check_progress(programs)) / num_messages

    assert calls_per_message(64) < calls_per_message(16) < 20
