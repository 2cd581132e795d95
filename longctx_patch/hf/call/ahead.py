"""Make the plans of the next batch while the model trains on this one.

Every batch of packed rows has other documents and so needs new plans. For a long row they take
milliseconds of the CPU, while the device would wait. Plans made here land in the caches that the
forward pass reads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


def ahead(
    batches: Iterable[Batch], prepare: Callable[[Batch], None], *, depth: int = 1
) -> Iterator[Batch]:
    """The batches in order; `prepare` runs for each in a thread, `depth` batches ahead.

    An error in `prepare` is raised in place of its batch.
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: plans are made 1 batch ahead or more.")
    waiting: deque[tuple[Batch, Future[None]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="longctx-plans") as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(prepare, batch)))
            if len(waiting) > depth:
                yield _ready(*waiting.popleft())
        while waiting:
            yield _ready(*waiting.popleft())


def _ready(batch: Batch, prepared: Future[None]) -> Batch:
    prepared.result()
    return batch
