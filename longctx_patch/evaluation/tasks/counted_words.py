"""RULER's `cwe` and `fwe`: the words that a text has most often."""

import math
import string
from random import Random

import numpy as np

from longctx_patch.evaluation.tasks.generator import (
    Draw,
    Generator,
    HaystackTooSmallError,
    Setup,
    too_short,
)

CWE_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
NUM_COMMON = 10
FWE_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
NUM_FREQUENT, NUM_LETTERS = 3, 6
ALPHA, ZETA_OF_ALPHA = 2.0, math.pi**2 / 6


class CommonWordGenerator(Generator):
    """Common words 30 times, the others 3 times each, in a numbered list; 6 times and once below
    4,096 tokens. A shorter list with its answer goes before."""

    num_answer_tokens = 120
    step = 10

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.words = list(setup.sources.single_words)
        Random(setup.seed).shuffle(self.words)

    def find_size(self) -> int:
        per_word = self.tokens_of(4096) / 4096
        return self.bisect(self.room, int(self.setup.length // per_word) * 2)

    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        if self.setup.length < 4096:
            example, common, _ = self._list(20, 3, 1)
            context, answers, others = self._list(size, 6, 1)
        else:
            example, common, _ = self._list(40, 10, 3)
            context, answers, others = self._list(size, 30, 3)
        solved = f"{CWE_PROMPT.format(context=example)} {_numbered(common)}"
        return Draw(
            text=f"{solved}\n{CWE_PROMPT.format(context=context)}",
            answers=tuple(answers),
            others=tuple(others),
        )

    def _list(self, size: int, often: int, seldom: int) -> tuple[str, list[str], list[str]]:
        """A numbered list, its common words and the others."""
        if size < NUM_COMMON:
            raise HaystackTooSmallError
        pool = self.words
        if size > len(pool):
            pool = self.setup.sources.more_words or []
        if size > len(pool):
            raise ValueError(
                f"cwe: {self.setup.length:,} tokens take {size:,} different words, and wonderwords "
                f"has {len(self.words):,}. Give RULER's english_words.json (`longctx eval "
                "--english-words FILE`, Sources(english_words=FILE)), or take a smaller length."
            )
        drawn = self.random.sample(pool, size)
        common, others = drawn[:NUM_COMMON], drawn[NUM_COMMON:]
        listed = common * often + others * seldom
        Random(self.setup.seed).shuffle(listed)
        return _numbered(listed), common, others


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


class FrequentWordGenerator(Generator):
    """Codes of six letters, as often as by Zipf's law. The most frequent one is dots."""

    num_answer_tokens = 50

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.step = self.room // 32
        self.num_codes = self.room // 50
        if self.num_codes <= 2 * NUM_FREQUENT:
            raise too_short(setup, self.num_answer_tokens + 50 * (2 * NUM_FREQUENT + 1))

    def find_size(self) -> int:
        """Words that fill the room: RULER goes up by steps until they are too many."""
        codes, size = self._codes(), self.room // NUM_LETTERS
        while self.setup.count(self._text(codes, size)) < self.room:
            size += self.step
        return size - self.step

    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        codes = self._codes()
        while size > 0 and self.setup.count(self._text(codes, size)) > self.room:
            size -= self.step
        return Draw(
            text=self._text(codes, size),
            answers=tuple(codes[1 : 1 + NUM_FREQUENT]),
            others=tuple(codes[1 + NUM_FREQUENT : 1 + 2 * NUM_FREQUENT]),
        )

    def _codes(self) -> list[str]:
        """Codes from the most frequent one on."""
        codes: set[str] = set()
        while len(codes) < self.num_codes:
            codes.add("".join(self.random.choices(string.ascii_lowercase, k=NUM_LETTERS)))
        shuffled = sorted(codes)
        Random(self.setup.seed).shuffle(shuffled)
        return ["...", *shuffled[1:]]

    def _text(self, codes: list[str], size: int) -> str:
        counts = size * (np.arange(1, len(codes) + 1) ** -ALPHA) / ZETA_OF_ALPHA
        words = [
            code
            for code, times in zip(codes, counts.astype(int).tolist(), strict=True)
            for _ in range(times)
        ]
        Random(self.setup.seed).shuffle(words)
        return FWE_PROMPT.format(context=" ".join(words))
