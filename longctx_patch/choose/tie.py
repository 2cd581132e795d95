"""Which of several candidates is taken: the one rule by which degrees, plans and layouts win.

The fastest wins. The cost model can't order candidates within `TIE` of the fastest better than
chance, so among those the rule takes what measurements favoured:

- The largest Ulysses degree. On 4 H200 with 131,072 causal tokens, 2 x 2 was predicted to take
  1.0 % longer than Ulysses over all four, and took 3 % longer: each kernel call of a ring is
  smaller, and messages compete with it for the device.
- Under equal degrees the fewest bytes, since bytes that are hidden today are the first to show on a
  slower link. On the same machine `allgather` was predicted to take 1.2 % less time than a zigzag
  ring, and took 2.3 % more.
- Then the smallest buffers.

Without a prediction all candidates count as equally fast, and the same rule decides.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from longctx_patch.predict.attention.costs import Prediction

TIE = 0.015
"""Candidates that are slower than the fastest by at most this share count as equally fast."""

Key = TypeVar("Key")


class Cost(NamedTuple):
    """What decides between candidates."""

    ulysses_degree: int
    seconds: float = 0.0
    sent_bytes: float = 0.0
    """What all ranks send together."""
    buffer_bytes: float = 0.0

    @classmethod
    def of(cls, predictions: Iterable[tuple[Prediction, float]]) -> "Cost":
        """The cost of (prediction, count): calls that run one after the other, `count` times."""
        calls = list(predictions)
        return cls(
            calls[0][0].ulysses_degree,
            sum(count * found.makespan_s for found, count in calls),
            sum(count * sum(found.bytes_sent_per_rank) for found, count in calls),
            max(found.peak_buffer_bytes for found, _ in calls),
        )

    def plus(self, seconds: float, sent_bytes: float) -> "Cost":
        """The cost with something more that runs before or after."""
        return self._replace(
            seconds=self.seconds + seconds, sent_bytes=self.sent_bytes + sent_bytes
        )


def preferred(costs: Mapping[Key, Cost]) -> Key:
    """The candidate that the rule takes; the first if several are equal."""
    limit = min(cost.seconds for cost in costs.values()) * (1 + TIE)
    tied = {key: cost for key, cost in costs.items() if cost.seconds <= limit}
    return min(
        tied,
        key=lambda key: (-tied[key].ulysses_degree, tied[key].sent_bytes, tied[key].buffer_bytes),
    )
