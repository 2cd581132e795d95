"""Stages of a run whose rows have different lengths: `16K:200,64K:100` are 200 steps on rows of
16,384 tokens, then 100 on rows of 65,536.

A step of each stage has about as many tokens as one of the longest: where rows are four times
shorter, a step accumulates over four times as many forwards (a ratio that is not whole is rounded).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from longctx_patch.rules.number_rules import parse_tokens

EXAMPLE = "Write LENGTH:STEPS, separated by commas: 16K:200,64K:100."


class LengthStage(NamedTuple):
    """Steps whose rows are equally long."""

    seq_len: int
    first: int
    """Steps of the run before it."""
    steps: int

    @property
    def last(self) -> int:
        """Steps of the run at its end."""
        return self.first + self.steps

    def forwards(self, longest: int, forwards: int) -> int:
        """Forwards of a step, where one over rows of `longest` has `forwards`."""
        return max(1, round(forwards * longest / self.seq_len))

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last}: rows of {self.seq_len:,} tokens"


def read_stages(text: str) -> tuple[LengthStage, ...]:
    """The stages that a text such as `16K:200,64K:100` says. Raises ValueError."""
    lengths, steps = [], []
    for part in text.split(","):
        length, _, number = part.strip().rpartition(":")
        try:
            lengths.append(parse_tokens(length))
            steps.append(int(number))
        except ValueError as error:
            raise ValueError(
                f"stages={text!r}: {part.strip()!r} is none ({error}). {EXAMPLE}"
            ) from error
        if steps[-1] < 1:
            raise ValueError(f"stages={text!r}: a stage has 1 step or more. {EXAMPLE}")
    firsts = accumulate(steps, initial=0)
    return tuple(map(LengthStage, lengths, firsts, steps))


def stages_text(stages: Sequence[LengthStage]) -> str:
    """The stages in the one way of writing that equal ones share."""
    return ",".join(f"{stage.seq_len}:{stage.steps}" for stage in stages)
