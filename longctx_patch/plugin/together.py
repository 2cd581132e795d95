"""Refusals that all ranks raise, so that none waits for one that has stopped."""

from collections.abc import Iterable

import torch.distributed as dist


def refuse_together(problems: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raise `error` on all ranks if one of them has a problem. Collective over the world."""
    mine = next(iter(problems), "")
    everyones = [mine]
    if dist.is_available() and dist.is_initialized():
        everyones = [""] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    found = mine or next(filter(None, everyones), "")
    if found:
        raise error(found)
