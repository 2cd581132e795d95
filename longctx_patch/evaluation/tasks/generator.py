"""Has what RULER's generators share: the search for the largest haystack, and draws that fit.

The texts are those of NVIDIA/RULER's generators (template `base`) for the same seed, length,
tokenizer and data: the same draws from random in the same order. Where RULER would try forever,
`ValueError` says what does not fit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from longctx_patch.evaluation.tasks.materials import Sources

NUM_TRIES = 100
"""Draws of the smallest haystack, each with other words, before a length counts as too small."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A sample as text."""

    text: str
    """The prompt with the beginning of the answer."""
    answers: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Wrong answers of the same kind."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds what a generator needs."""

    task: str
    count: Callable[[str], int]
    """Tokens of a text, without special ones."""
    length: int
    seed: int
    sources: Sources


class HaystackTooSmallError(Exception):
    """A haystack has fewer places than there are needles."""


class Generator(ABC):
    """Draws of one task at one length."""

    num_answer_tokens: ClassVar[int]
    """Tokens that RULER leaves to the answer."""
    step: int
    """Units of haystack by which a draw shrinks that does not fit."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = Random(setup.seed)
        self.room = setup.length - self.num_answer_tokens

    @abstractmethod
    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        """The sample `index` with `size` units of haystack."""

    @abstractmethod
    def find_size(self) -> int:
        """Units of haystack with which a sample fits."""

    def tokens_of(self, size: int) -> int:
        return self.setup.count(self.draw(size, 0, None).text)

    def most_units(self, length: int) -> int:
        """Three times as many units as one expects from the tokens of a small haystack."""
        return int((length / (self.tokens_of(self.step) / self.step)) * 3)

    def bisect(self, room: int, most: int) -> int:
        """The largest size that fitted of those tried, the step if none did."""
        low, high, found = self.step, max(most, 2 * self.step), self.step
        while low <= high:
            middle = (low + high) // 2
            if self.tokens_of(middle) <= room:
                found, low = middle, middle + 1
            else:
                high = middle - 1
        return found

    def draw_fitting(self, size: int, index: int, depth: float | None, room: int) -> Draw:
        """The first draw of `room` tokens at most, each of a smaller haystack."""
        num_tokens = 0
        for _ in range(NUM_TRIES + size // self.step):
            try:
                found = self.draw(size, index, depth)
                num_tokens = self.setup.count(found.text)
                if num_tokens <= room:
                    return found
            except HaystackTooSmallError:
                pass
            if size > self.step:
                size -= self.step
        raise too_short(self.setup, num_tokens + self.num_answer_tokens)


def too_short(setup: Setup, num_tokens: int) -> ValueError:
    return ValueError(
        f"{setup.task}: {setup.length:,} tokens are too few. With the least haystack, a sample and "
        f"its answer have {num_tokens:,}. Take a greater length, or leave this task out."
    )
