"""Prove that ranks which run their programs side by side all come to the end.

A program is what one rank runs: its steps in order. In each step it posts all its sends and
receives, computes, and waits for every one of them. Only the order says which send and which
receive of two ranks belong together: the k-th send from `a` to `b` meets the k-th receive of `b`
from `a`, as in the point-to-point batches of NCCL and gloo.

Both ends of a message must be posted in the same step, in one order on both sides. Then the ranks
that are in the earliest step wait for nobody who is further behind, so that they always go on.
Inputs and results may travel on groups of their own: if all messages of two ranks match in one
order, those of each group do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from longctx_patch.plans.types import RankStep, Transfer

Link = tuple[int, int]
"""Source and destination."""


def check_progress(programs: Sequence[Sequence[RankStep]]) -> list[str]:
    """Complaints about the programs of ranks 0, 1, ...; none if every rank comes to its end.

    Each begins with the name of the broken rule: `match`, a send without a receive in its step or
    the reverse; `order`, a send and a receive that meet but are of different transfers.
    """
    complaints = []
    for number, steps in enumerate(zip_longest(*programs, fillvalue=RankStep((), (), ()))):
        sends: dict[Link, list[Transfer]] = defaultdict(list)
        receives: dict[Link, list[Transfer]] = defaultdict(list)
        for rank, step in enumerate(steps):
            for sent in step.sends:
                sends[rank, sent.destination].append(sent)
            for received in step.receives:
                receives[received.source, rank].append(received)
        for link in sorted(link for link in {*sends, *receives} if sends[link] != receives[link]):
            complaints += [
                f"{why} from rank {link[0]} to rank {link[1]} in step {number}: {transfers}"
                for why, transfers in _differences(sends[link], receives[link])
            ]
    return complaints


def _differences(sends: list[Transfer], receives: list[Transfer]) -> Iterator[tuple[str, str]]:
    """Compares the two sides of a link in a step: yields the broken rule and the transfers."""
    unreceived = (Counter(sends) - Counter(receives)).elements()
    unsent = (Counter(receives) - Counter(sends)).elements()
    lines = [("match: sent and not received", str(transfer)) for transfer in unreceived]
    lines += [("match: received and not sent", str(transfer)) for transfer in unsent]
    yield from lines
    pairs = enumerate(zip(sends, receives, strict=False))
    if not lines:
        number, (sent, received) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        yield f"order: message {number}", f"sent is {sent}, received {received}"
