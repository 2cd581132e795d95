"""Prove that ranks which run their programs side by side all come to the end.

A program is what one rank runs: its steps in order. In each step it posts all its sends and
receives, computes, and waits for every one of them. Only the order says which send and which
receive of two ranks belong together: the k-th send from `a` to `b` meets the k-th receive of `b`
from `a`, as in the point-to-point batches of NCCL and gloo. A message is taken to finish once both
ends have posted it; a backend that buffers small sends waits less, never more.

Inputs and results may travel on groups of their own. Holding all messages of two ranks to one order
is stricter than that: if all match, those of each group do.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from longctx_patch.plans.types import RankStep, Transfer

MAX_NAMED = 4
"""How many stuck ranks are described, each in a line."""


class _Place(NamedTuple):
    """A rank at the start of a step; one step after its last it has finished."""

    rank: int
    step: int


class _Post(NamedTuple):
    """One end of a message, and where its rank posts it."""

    place: _Place
    transfer: Transfer


class _Link(NamedTuple):
    """Both ends of all messages from one rank to another, each side in its rank's order."""

    source: int
    destination: int
    sends: list[_Post]
    receives: list[_Post]


def check_progress(programs: Sequence[Sequence[RankStep]]) -> list[str]:
    """Complaints about the programs of ranks 0, 1, ...; none if every rank comes to its end.

    Each begins with the name of the broken rule: `match`, a send without a receive or the reverse;
    `order`, a send and a receive that meet but are of different transfers; `deadlock`, ranks that
    wait for each other. Deadlocks are looked for once every message has two ends, since whoever
    waits for a missing one is stuck anyway.
    """
    links = _links(programs)
    unmatched = [line for link in links for line in _unmatched(link)]
    complaints = unmatched + [line for link in links for line in _out_of_order(link)]
    return complaints if unmatched else complaints + _deadlocks(programs, _waits(links))


def _links(programs: Sequence[Sequence[RankStep]]) -> list[_Link]:
    links: dict[tuple[int, int], _Link] = {}

    def link(source: int, destination: int) -> _Link:
        return links.setdefault((source, destination), _Link(source, destination, [], []))

    for rank, program in enumerate(programs):
        for number, step in enumerate(program):
            here = _Place(rank, number)
            for sent in step.sends:
                link(rank, sent.destination).sends.append(_Post(here, sent))
            for received in step.receives:
                link(received.source, rank).receives.append(_Post(here, received))
    return [links[ranks] for ranks in sorted(links)]


def _unmatched(link: _Link) -> Iterator[str]:
    """Where one side posts more than the other: what only that side has."""
    source, destination, sends, receives = link
    if len(sends) == len(receives):
        return
    for place, transfer in _surplus(sends, receives):
        yield (
            f"match: step {place.step}: rank {source} sends what rank {destination} has no receive "
            f"for: {transfer}"
        )
    for place, transfer in _surplus(receives, sends):
        yield (
            f"match: step {place.step}: rank {destination} receives what rank {source} has no send "
            f"for: {transfer}"
        )


def _surplus(posts: list[_Post], others: list[_Post]) -> Iterator[_Post]:
    """Posts whose transfer the other side has not, or less often."""
    left = Counter(post.transfer for post in others)
    for post in posts:
        left[post.transfer] -= 1
        if left[post.transfer] < 0:
            yield post


def _out_of_order(link: _Link) -> list[str]:
    """The first two ends that meet and differ; those after them mostly follow from it."""
    source, destination, sends, receives = link
    if len(sends) != len(receives):
        return []
    for number, (sent, received) in enumerate(zip(sends, receives, strict=True)):
        if sent.transfer != received.transfer:
            return [
                f"order: message {number} from rank {source} to rank {destination} is sent in step "
                f"{sent.place.step} as {sent.transfer}, but received in step "
                f"{received.place.step} as {received.transfer}"
            ]
    return []


def _waits(links: list[_Link]) -> dict[_Place, list[_Place]]:
    """By the place where a rank is: the places that others must reach before it may go on."""
    waits: dict[_Place, list[_Place]] = {}
    for link in links:
        for sent, received in zip(link.sends, link.receives, strict=True):
            waits.setdefault(sent.place, []).append(received.place)
            waits.setdefault(received.place, []).append(sent.place)
    return waits


def _deadlocks(
    programs: Sequence[Sequence[RankStep]], waits: dict[_Place, list[_Place]]
) -> list[str]:
    """A line for each rank that can't finish, those that wait in a circle first."""
    reached = _reached(programs, waits)
    wanted = {
        rank: next(place for place in waits[_Place(rank, step)] if place.step > reached[place.rank])
        for rank, step in enumerate(reached)
        if step < len(programs[rank])
    }

    def line(rank: int) -> str:
        peer, step = wanted[rank]
        return (
            f"deadlock: rank {rank} waits in step {reached[rank]} for rank {peer}, which posts "
            f"that message in step {step} and waits in step {reached[peer]} for rank "
            f"{wanted[peer].rank}"
        )

    stuck = _circle_first(wanted)
    unnamed = len(stuck) - MAX_NAMED
    rest = [f"deadlock: {unnamed} more of {len(programs)} ranks are stuck"] if unnamed > 0 else []
    return [line(rank) for rank in stuck[:MAX_NAMED]] + rest


def _reached(
    programs: Sequence[Sequence[RankStep]], waits: dict[_Place, list[_Place]]
) -> list[int]:
    """By rank: the step that it never leaves, or the number of its steps."""
    order: TopologicalSorter[_Place] = TopologicalSorter()
    for rank, program in enumerate(programs):
        order.add(_Place(rank, 0))
        for step in range(len(program)):
            here = _Place(rank, step)
            order.add(_Place(rank, step + 1), here, *waits.get(here, ()))
    with suppress(CycleError):  # the places that don't depend on a cycle still come out
        order.prepare()
    reached = [0] * len(programs)
    while places := order.get_ready():
        for rank, step in places:
            reached[rank] = step  # a rank's places come in their order
        order.done(*places)
    return reached


def _circle_first(wanted: dict[int, _Place]) -> list[int]:
    """The stuck ranks, beginning with a circle of them.

    Each waits for another stuck rank, so whoever follows them goes around a circle in the end.
    """
    if not wanted:
        return []
    rank = min(wanted)
    for _ in wanted:
        rank = wanted[rank].rank
    circle = [rank]
    while (rank := wanted[rank].rank) != circle[0]:
        circle.append(rank)
    return circle + [rank for rank in wanted if rank not in circle]
