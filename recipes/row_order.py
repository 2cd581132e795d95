"""Says which rows each step takes: it follows from the step's number alone, so that a run can
resume at any step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Row = dict[str, list[int]]
"""`input_ids`, and `seq_lengths` where rows are packed: the lengths of the row's documents."""


def check_batch(name: str, size: int, num_rows: int) -> None:
    """Raise ValueError for a batch of more rows than there are. `name`: of its setting."""
    if size > num_rows:
        raise ValueError(
            f"{name}={size}: a batch has no row twice, and the data has {num_rows} in all. Give "
            f"{num_rows} or fewer; gradient_accumulation_steps makes a step of several batches."
        )


def evenly(num_rows: int, most: int) -> list[int]:
    """The numbers of `most` rows, spread over all of them; 0: of all."""
    taken = min(num_rows, most or num_rows)
    return [number * num_rows // taken for number in range(taken)]


@dataclass(kw_only=True)
class RowOrder:
    """Says which rows each replica takes in each forward: shuffled in every pass over the data.

    A step takes the next `replicas * batch_size * accumulation` rows of one endless sequence, so
    two worlds with the same product train on the same rows in every step.
    """

    rows: Sequence[Row]
    replicas: int
    batch_size: int
    accumulation: int
    seed: int
    _shuffled: tuple[int, np.ndarray] | None = field(default=None, init=False)

    @property
    def rows_per_step(self) -> int:
        return self.replicas * self.batch_size * self.accumulation

    def micro_batches(self, step: int, replica: int) -> list[list[Row]]:
        """Rows of `replica` in `step` (from 0), one list per forward."""
        return [[self.rows[index] for index in batch] for batch in self.indices(step, replica)]

    def indices(self, step: int, replica: int) -> list[list[int]]:
        """The numbers of these rows in `rows`."""
        batches = []
        for micro in range(self.accumulation):
            first = step * self.rows_per_step
            first += (micro * self.replicas + replica) * self.batch_size
            batches.append([self._row_index(first + offset) for offset in range(self.batch_size)])
        return batches

    def _row_index(self, position: int) -> int:
        epoch, within = divmod(position, len(self.rows))
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._shuffled = (epoch, generator.permutation(len(self.rows)))
        return int(self._shuffled[1][within])
