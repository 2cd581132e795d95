"""RULER's eight tasks of needles in a haystack (`niah`)."""

import uuid
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from longctx_patch.evaluation.tasks.generator import Draw, Generator, HaystackTooSmallError, Setup
from longctx_patch.evaluation.tasks.materials import NOISE

Kind = Literal["numbers", "words", "uuids"]
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are"
)
PERCENTS: list[int] = np.round(np.linspace(0, 100, num=40)).astype(int).tolist()
"""Where RULER puts needles between the sentences of essays."""


@dataclass(frozen=True, kw_only=True)
class Needles:
    """Says which needles a task hides where."""

    haystack: Literal["noise", "essays", "needles"]
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1

    @property
    def num_answers(self) -> int:
        return self.num_asked * self.num_values


class NeedleGenerator(Generator):
    num_answer_tokens = 128

    def __init__(self, setup: Setup, needles: Needles) -> None:
        super().__init__(setup)
        self.needles = needles
        self.words = setup.sources.word_pairs
        self.essays = setup.sources.haystack if needles.haystack == "essays" else None
        if self.essays is not None:
            self.step = self.essays.step or max(1, setup.length // 50)  # words
        else:
            self.step = 25 if setup.length >= 4096 else 5  # lines

    def find_size(self) -> int:
        return self.bisect(self.room, self.most_units(self.setup.length))

    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        keys, values = [], []
        for _ in range(self.needles.num_keys):
            keys.append(self._value(self.needles.keys))
            values.append(
                [self._value(self.needles.values) for _ in range(self.needles.num_values)]
            )
        needles = [
            self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own
        ]
        Random(self.setup.seed).shuffle(needles)
        pieces, places = self._places(size, len(needles))
        asked = self.random.sample(range(len(keys)), self.needles.num_asked)
        if depth is not None:  # the needle asked for goes there, the others stay
            number = needles.index(self._needle(keys[asked[0]], values[asked[0]][0]))
            places[number] = int(len(pieces) * depth)
        answers = tuple(value for number in asked for value in values[number])
        return Draw(
            text=self._prompt(
                self._context(pieces, places, needles), [keys[number] for number in asked]
            ),
            answers=answers,
            others=_crossed(answers),
        )

    def _places(self, size: int, num_needles: int) -> tuple[list[str], list[int]]:
        """Pieces of the haystack, and before which of them each needle is."""
        if self.essays is not None:
            sentences = self.essays.sentences(size)
            percents = self.random.sample(PERCENTS, num_needles)
            return sentences, sorted(int(len(sentences) * (each / 100)) for each in percents)
        if size < num_needles:
            raise HaystackTooSmallError
        lines = [NOISE] * size
        if self.needles.haystack == "needles":
            lines = [
                self._needle(self._value(self.needles.keys), self._value(self.needles.values))
                for _ in range(size)
            ]
        return lines, sorted(self.random.sample(range(size), num_needles), reverse=True)

    def _context(self, pieces: list[str], places: list[int], needles: list[str]) -> str:
        # RULER joins sentences even where there are none between two needles, and lines one by one.
        separator = "\n" if self.essays is None else " "
        found, end = [], 0
        for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
            if place > end or self.essays is not None:
                found.append(separator.join(pieces[end:place]))
            found.append(needle)
            end = place
        if end < len(pieces) or self.essays is not None:
            found.append(separator.join(pieces[end:]))
        return separator.join(found)

    def _value(self, kind: Kind) -> str:
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "words":
            return self.random.choice(self.words)
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.needles.values, key=key, value=value)

    def _prompt(self, context: str, asked: list[str]) -> str:
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        template, kind = PROMPT, str(self.needles.values)
        if self.needles.num_answers == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind.removesuffix("s")
        return template.format(kind=kind, context=context, query=query)


def _crossed(values: tuple[str, ...]) -> tuple[str, ...]:
    """Wrong values, each of which begins as one of the answers and ends as another.

    So all their digits are in the text, and only who recalls a whole value prefers it.
    """
    half = len(values[0]) // 2
    ends = values[1:] + values[:1]
    crossed = (value[:half] + end[half:] for value, end in zip(values, ends, strict=True))
    return tuple(value for value in crossed if value not in values)
