"""Make the plans of the next batch while the model trains on this one.

Packed rows have documents of their own, so every batch has plans of its own: milliseconds of the
CPU for a long row, in which the device would wait. What is made here lands in the caches that the
forward pass looks into.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


def one_ahead(batches: Iterable[Batch], prepare: Callable[[Batch], None]) -> Iterator[Batch]:
    """The batches in order; `prepare` runs for each in a thread, one batch ahead.

    What it raises is raised where its batch would come.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="longctx-plans") as pool:
        waiting: tuple[Batch, Future[None]] | None = None
        for batch in batches:
            following = (batch, pool.submit(prepare, batch))
            if waiting is not None:
                yield _ready(waiting)
            waiting = following
        if waiting is not None:
            yield _ready(waiting)


def _ready(waiting: tuple[Batch, Future[None]]) -> Batch:
    batch, prepared = waiting
    prepared.result()
    return batch
