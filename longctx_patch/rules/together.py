"""Facts that all ranks tell each other on the host, and refusals on all of them."""

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist

Fact = TypeVar("Fact")


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if _has_group() else 0


def num_ranks() -> int:
    """The processes of the group; 1 without one."""
    return dist.get_world_size() if _has_group() else 1


def of_all_ranks(mine: Fact, group: dist.ProcessGroup | None = None) -> list[Fact]:
    """Gathers what each rank gives, by rank; anything that pickles. Collective over the world.

    `group`: all ranks in a group of their own, for a thread beside the one that trains."""
    if not _has_group():
        return [mine]
    everyones: list[Fact] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def refuse_together(problems: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raise `error` on all ranks if one of them has a problem, so that none waits for one that has
    stopped. Collective over the world."""
    mine = next(iter(problems), "")
    everyones = of_all_ranks(mine)  # also where this rank has a problem: the others wait for it
    found = mine or next(filter(None, everyones), "")
    if found:
        raise error(found)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
