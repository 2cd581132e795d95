"""Seeds of the processes that read batches beside the training."""

from functools import partial
from typing import Any


def seeded_by_group(dataloader: Any, degree: int) -> Any:
    """A trainer's dataloader whose workers have the seeds of their group's number in place of their
    rank's, as on one process for each group: what a collator draws is then the same on all ranks
    that share a row.

    Args:
        dataloader: as Accelerate has prepared it.
        degree: ranks that share a row.
    """
    reading = getattr(dataloader, "base_dataloader", dataloader)
    seed = getattr(reading, "worker_init_fn", None)
    if isinstance(seed, partial) and "rank" in seed.keywords:  # transformers' `seed_worker`
        group = seed.keywords["rank"] // degree
        reading.worker_init_fn = partial(seed, rank=group)
    return dataloader
