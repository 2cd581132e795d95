"""One question over a long context, and how its answer is scored."""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["forced", "ranked"]
"""How an answer is scored without generating it.

* `forced`: teacher-forced. Each token of the expected answer is to be the most likely one after
  the tokens before it. Greedy decoding then emits exactly this answer, so both score alike.
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
    """Where the needle lies, from 0 (the first token) to 1; None where there are several."""
    prompt: tuple[int, ...]
    """Token ids up to the answer, its prefix included."""
    answers: tuple[tuple[int, ...], ...]
    """Token ids of what is expected. Forced: the parts of one answer, in their order, of which each
    counts by itself. Ranked: each of the answers."""
    others: tuple[tuple[int, ...], ...] = ()
    """Ranked: token ids of answers that are wrong."""
    scoring: Scoring = "forced"

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row that this sample needs."""
        if self.scoring == "forced":
            return len(self.prompt) + sum(map(len, self.answers))
        return len(self.prompt) + max(map(len, (*self.answers, *self.others)))
