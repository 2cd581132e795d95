"""RULER's `vt`: variables that have the value of a first one, by a chain of assignments."""

import string
from dataclasses import replace
from itertools import pairwise

import numpy as np

from longctx_patch.evaluation.tasks.generator import Draw, Generator, HaystackTooSmallError, Setup
from longctx_patch.evaluation.tasks.materials import NOISE

NUM_HOPS = 4
PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assgined the value {value}, they are: "
)
EXAMPLE_VALUE, EXAMPLE_LENGTH, EXAMPLE_STEP = "12345", 500, 5


class VariableGenerator(Generator):
    num_answer_tokens = 30

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.numbers = np.random.RandomState(setup.seed)
        self.example: Draw | None = None
        """A solved question with names of three letters, which goes before each question."""
        self.step = EXAMPLE_STEP
        size = self.bisect(EXAMPLE_LENGTH, self.most_units(EXAMPLE_LENGTH))
        try:
            self.example = self.draw_fitting(size, 0, None, EXAMPLE_LENGTH)
        except ValueError:
            raise ValueError(
                f"vt: its solved example, to which RULER leaves {EXAMPLE_LENGTH} tokens, has more "
                "with this tokenizer. Leave this task out."
            ) from None
        self.step = 10 if setup.length >= 4096 else 5

    def find_size(self) -> int:
        most = self.most_units(self.setup.length)
        return self.bisect(self.room - self.setup.count(self._solved()), most)

    def tokens_of(self, size: int) -> int:
        return self.setup.count(self._question(size).text)

    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        question = self._question(size)
        if self.example is None:
            return question
        return replace(question, text=f"{self._new_example()}\n{question.text}")

    def _question(self, size: int) -> Draw:
        num_letters = 3 if self.example is None else 5
        names = [
            "".join(self.random.choices(string.ascii_uppercase, k=num_letters))
            for _ in range(NUM_HOPS + 1)
        ]
        if len(set(names)) <= NUM_HOPS or size <= NUM_HOPS:
            raise HaystackTooSmallError
        value = EXAMPLE_VALUE if self.example is None else str(self.numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {last} " for last, name in pairwise(names)]
        lines = [NOISE] * size
        for number, place in enumerate(sorted(self.random.sample(range(size), len(chain)))):
            lines.insert(place + number, chain[number])
        context = "\n".join(lines).replace(". \n", ".\n")
        text = PROMPT.format(context=context, value=value, count=len(names))
        return Draw(text=text, answers=tuple(names))

    def _solved(self) -> str:
        assert self.example is not None
        return f"{self.example.text} {' '.join(self.example.answers)}\n"

    def _new_example(self) -> str:
        """The example with other names and another value in each sample."""
        assert self.example is not None
        found = self._solved()
        for name in self.example.answers:
            new = "".join(self.random.choices(string.ascii_uppercase, k=len(name)))
            found = found.replace(name, new)
        return found.replace(EXAMPLE_VALUE, str(self.numbers.randint(10000, 99999)))
