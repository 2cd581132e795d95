"""Each planted fault gives the complaint that names it; programs without a fault finish."""

from random import Random

from longctx_patch.plans import Block, Direction, Operand, RankStep, Transfer
from longctx_patch.plans.verify.no_deadlock import check_progress
from longctx_patch.sequence.layout import Interval, Rows, zigzag
from longctx_patch.sequence.masks import causal
from tests.counting import count_calls
from tests.plans.random_masks import make_plan

Programs = list[list[RankStep]]
IDLE = RankStep((), (), ())


def programs_of(name: str, num_ranks: int) -> Programs:
    """The programs of backward under this plan."""
    layout, mask = zigzag(16 * num_ranks, num_ranks), causal(16 * num_ranks)
    plan = make_plan(name, layout, mask, Direction.BACKWARD)
    return [list(steps) for steps in plan.rank_steps]


def message(source: int, destination: int, number: int = 0) -> Transfer:
    """A message whose rows distinguish it from others of the link."""
    rows = Rows((Interval(number, number + 1),))
    return Transfer(source, destination, Block(Operand.KV, source, rows), 0)


def send(*transfers: Transfer) -> RankStep:
    return RankStep(transfers, (), ())


def receive(*transfers: Transfer) -> RankStep:
    return RankStep((), transfers, ())


def test_messages_without_a_partner_are_named() -> None:
    once, lost = message(0, 1), message(0, 9)
    assert check_progress([[send(once, once)], [receive(once)]]) == [
        f"match: sent and not received from rank 0 to rank 1 in step 0: {once}"
    ]
    assert check_progress([[send(lost)], []]) == [
        f"match: sent and not received from rank 0 to rank 9 in step 0: {lost}"
    ]
    late = [[send(once)], [IDLE, receive(once)]]
    assert [line.split(" from")[0] for line in check_progress(late)] == [
        "match: sent and not received",
        "match: received and not sent",
    ]


def test_messages_swapped_within_a_step_are_named() -> None:
    """Backward of the ring sends keys and a sum over the same link in one step."""
    programs = programs_of("zigzag", 4)
    step = programs[2][2]
    keys, sums = step.receives
    programs[2][2] = step._replace(receives=(sums, keys))
    assert check_progress(programs) == [
        f"order: message 0 from rank 1 to rank 2 in step 2: sent is {keys}, received {sums}"
    ]


def random_programs(random: Random) -> Programs:
    """Programs of three ranks with four steps; on some links receives are a step late."""
    links = [(a, b) for a in range(3) for b in range(3) if a != b]
    late = [link for link in links if random.random() < 0.25]
    programs = [[IDLE] * 5 for _ in range(3)]
    for number, step in enumerate(sorted(random.choices(range(4), k=20))):
        source, destination = link = random.choice(links)
        transfer, later = message(source, destination, number), step + (link in late)
        sender, receiver = programs[source][step], programs[destination][later]
        programs[source][step] = sender._replace(sends=(*sender.sends, transfer))
        programs[destination][later] = receiver._replace(receives=(*receiver.receives, transfer))
    return programs


def all_finish(programs: Programs) -> bool:
    """Whether all ranks finish if, one at a time, each advances as long as any can."""
    at = [0] * len(programs)

    def posted(rank: int, transfer: Transfer) -> bool:
        return any(transfer in (*s.sends, *s.receives) for s in programs[rank][: at[rank] + 1])

    def can_go_on(rank: int) -> bool:
        if at[rank] == len(programs[rank]):
            return False
        step = programs[rank][at[rank]]
        peers = [(t.destination, t) for t in step.sends] + [(t.source, t) for t in step.receives]
        return all(posted(peer, transfer) for peer, transfer in peers)

    while movable := [rank for rank in range(len(programs)) if can_go_on(rank)]:
        at[movable[0]] += 1
    return at == [len(program) for program in programs]


def test_programs_without_a_complaint_finish() -> None:
    found = []
    for seed in range(100):
        programs = random_programs(Random(seed))
        found.append((check_progress(programs) == [], all_finish(programs)))
    assert (True, False) not in found
    assert {(True, True), (False, False)} <= set(found)


def test_checking_takes_a_constant_number_of_calls_for_each_message() -> None:
    def calls_per_message(num_ranks: int) -> float:
        programs = programs_of("zigzag", num_ranks)
        num_messages = sum(len(step.sends) for program in programs for step in program)
        return count_calls(lambda: check_progress(programs)) / num_messages

    assert calls_per_message(64) < calls_per_message(16) < 20
