"""One question over a long context, and how its answer is scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scoring = Literal["forced", "ranked"]
"""How an answer is scored without generating it.

* `forced`: teacher-forced. Each token of the expected answer is to be the most likely one after
  the tokens before it. Greedy decoding emits exactly this answer then and only then.
* `ranked`: where wording or order are free. The expected answers are to have a higher
  log-probability than all others.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt of token ids that ends where the answer begins."""

    task: str
    """Its name in the results: `niah_single_1`."""
    length: int
    """Tokens asked for: those of the prompt and of the answer are this many at most."""
    depth: float | None
    """Where the needle was put, from 0 (the first token) to 1; None where its place was drawn, and
    where there are several."""
    prompt: Sequence[int]
    """Token ids up to the answer, its prefix included."""
    answers: tuple[tuple[int, ...], ...]
    """Token ids of what is expected. Forced: the parts of one answer, in their order. A part counts
    if all tokens up to its end are right, as greedy decoding emits it then. Ranked: each of the
    answers."""
    spellings: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Forced: other ways to write the answer, each with its parts: `: 123` besides ` 123`. The
    sample has the best score of all ways; greedy decoding takes one of them at most."""
    others: tuple[tuple[int, ...], ...] = ()
    """Ranked: token ids of answers that are wrong."""
    scoring: Scoring = "forced"

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row that this sample needs."""
        if self.scoring == "forced":
            ways = (self.answers, *self.spellings)
            return len(self.prompt) + max(sum(map(len, way)) for way in ways)
        return len(self.prompt) + max(map(len, (*self.answers, *self.others)))
