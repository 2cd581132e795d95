"""Batches of whole rows that begin alike, and what stock transformers makes of each row apart.

Nothing here knows how the package finds what rows share: it is counted by sets of ids.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.hf.features import VOCABULARY
from tests.hf.steps import Step
from tests.hf.tiny import gradients

IGNORED = -100
Ids = list[int]


class Shared(NamedTuple):
    """Rows of ids, and how they are batched."""

    rows: tuple[Ids, ...]
    answers: tuple[int, ...]
    """Where each row's labels begin; all rows have one label less in the middle."""
    left: tuple[int, ...]
    """Columns of padding before each row."""
    length: int
    """Columns of the batch."""
    labels: tuple[Ids, ...] = ()
    """Words that are wanted in place of the rows' own."""

    @property
    def given(self) -> dict[str, Tensor]:
        """As a trainer gives them; padding has an id that rows have too."""
        shape = (len(self.rows), self.length)
        ids, mask = torch.full(shape, 3), torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED)
        for number, (row, start, first) in enumerate(
            zip(self.rows, self.left, self.answers, strict=True)
        ):
            stop = start + len(row)
            ids[number, start:stop], mask[number, start:stop] = torch.tensor(row), 1
            wanted = torch.tensor(self.labels[number] if self.labels else row)
            labels[number, start + first : stop] = wanted[first:]
            labels[number, (start + first + stop) // 2] = IGNORED
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def shared(
    rows: Sequence[Ids], answers: int | Sequence[int], side: str = "right", **more: Any
) -> Shared:
    """`side`: of the padding; `both`: rows end where they like, three columns further right."""
    longest = max(map(len, rows))
    start = {"right": 0, "both": 3, "left": longest}[side]
    left = tuple(start - (len(row) if side == "left" else 0) for row in rows)
    firsts = (answers,) * len(rows) if isinstance(answers, int) else tuple(answers)
    length = longest + (5 if side == "both" else 0)
    return Shared(tuple(rows), firsts, left, length, **more)


def draw(seed: int, *lengths: int) -> list[Ids]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _pair(side: str = "right", prompt: int = 23) -> Shared:
    start, a, b = draw(1, prompt, 7, 12)
    return shared([[*start, 5, *a], [*start, 6, *b]], prompt, side)


def _tree() -> Shared:
    """Two questions after one text, and two answers to each. The first row learns its question,
    which the second row has as a prompt."""
    text, q1, q2, *answers = draw(2, 17, 5, 6, 4, 7, 6, 3)
    starts = [[*text, 7, *q1], [*text, 7, *q1], [*text, 8, *q2], [*text, 8, *q2]]
    rows = [[*a, 10 + n, *b] for n, (a, b) in enumerate(zip(starts, answers, strict=True))]
    return shared(rows, (18, 23, 24, 20), "left")


def _group() -> Shared:
    prompt, *answers = draw(3, 13, *range(1, 9))
    return shared([[*prompt, 20 + n, *a] for n, a in enumerate(answers)], 13, "both")


def _two_tokens() -> Shared:
    rows = draw(4, 11, 14, 9)
    return shared([[9, 30, 40 + n, *row] for n, row in enumerate(rows)], 4)


def _equal() -> Shared:
    """The third row begins as the two do that are equal."""
    row, other = draw(5, 19, 6)
    return shared([row, row, row[:11] + other], (9, 6, 11), "left")


def _nothing() -> Shared:
    return shared([[n, *row] for n, row in enumerate(draw(6, 12, 17, 5))], 3)


def _long_branch() -> Shared:
    start, a, b, c = draw(7, 3, 31, 2, 5)
    return shared([[*start, 50 + n, *row] for n, row in enumerate((a, b, c))], 3)


def _beginnings() -> Shared:
    """Rows that are beginnings of others: one without a token of its own, one of one token, and one
    of none."""
    row, other = draw(8, 25, 4)
    return shared([row, row[:16], row[:16] + other, row[:1], []], (12, 10, 16, 0, 0))


def _one_id() -> Shared:
    """Rows that differ in one id of their prompt, and agree again after it."""
    start, end, a, b = draw(11, 9, 10, 6, 8)
    return shared([[*start, 70 + n, *end, *row] for n, row in enumerate((a, b, a))], 20)


def _two_prompts() -> Shared:
    """Gives rows of two conversations in turn, one of which begins with the id of padding."""
    one, two, *answers = draw(9, 15, 9, 5, 6, 7, 8)
    starts = [[3, *one], two, [3, *one], two]
    rows = [[*a, 60 + n, *b] for n, (a, b) in enumerate(zip(starts, answers, strict=True))]
    return shared(rows, (16, 9, 16, 9), "left")


def _tiny() -> Shared:
    """Fewer tokens than ranks have slots."""
    return shared([[5], [5, 6], [5, 6], [5, 6, 7]], 1)


def _whole_text() -> Shared:
    """Every token has a label, in both rows."""
    return _pair()._replace(answers=(0, 0))


def _other_words() -> Shared:
    """The same ids with other labels: words that a teacher says, say."""
    rows = _pair("left").rows
    return shared(rows, 5, "left", labels=tuple(draw(10, *map(len, rows))))


BATCHES = {
    "pair": _pair(),
    "tree": _tree(),
    "group": _group(),
    "two tokens": _two_tokens(),
    "equal": _equal(),
    "nothing": _nothing(),
    "long branch": _long_branch(),
    "beginnings": _beginnings(),
    "one id": _one_id(),
    "two prompts": _two_prompts(),
    "tiny": _tiny(),
    "whole text": _whole_text(),
    "other words": _other_words(),
}


def fewest_tokens(batch: Shared) -> int:
    """The size of the tree of all rows: beginnings that differ."""
    return len({tuple(row[:stop]) for row in batch.rows for stop in range(1, 1 + len(row))})


def tokens_of_tree(batch: Shared, *, has_labels: bool = True) -> int:
    """The same if rows share a token where they agree in the next one too, which is its label. With
    labels, a row that learns another word has its tokens for itself from there on."""
    given, found = batch.given, set[object]()
    for number, (row, start) in enumerate(zip(batch.rows, batch.left, strict=True)):
        labels = given["labels"][number, start : start + len(row)].tolist()
        own = [n for n in range(1, len(row)) if labels[n] not in (IGNORED, row[n])]
        alike = min(own if has_labels else (), default=len(row)) - 1
        for place in range(len(row)):
            found.add(tuple(row[: place + 2]) if place < alike else (number, place))
    return len(found)


def weights_of(batch: Shared) -> Tensor:
    """Another one for each token of each row."""
    shape = batch.given["labels"][:, 1:].shape
    return torch.linspace(-1, 2, shape.numel(), dtype=torch.float64).view(shape)


def apart(model: Any, batch: Shared) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels `[B, L - 1]` and all logits `[B, L, words]`, of the stock model
    that runs each row by itself; 0 where there is none. With gradients."""
    given = batch.given
    values, logits = [], []
    for number, (row, start) in enumerate(zip(batch.rows, batch.left, strict=True)):
        ids = torch.tensor([row or [0]])  # an empty row has no logits
        found = model(input_ids=ids, use_cache=False).logits[0, : len(row)]
        after = batch.length - start - len(row)
        logits.append(torch.nn.functional.pad(found, (0, 0, start, after)))
        labels = given["labels"][number, 1:]
        logs = logits[-1][:-1].log_softmax(-1)
        chosen = logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        values.append(chosen * (labels != IGNORED))
    return torch.stack(values), torch.stack(logits)


def weighted(log_probs: Tensor, batch: Shared) -> Tensor:
    return (weights_of(batch).to(log_probs) * log_probs).sum()


class Wanted(NamedTuple):
    """What rows apart give."""

    log_probs: Tensor
    logits: Tensor
    weighted: Step
    """A step on log-probabilities with weights by token."""
    mean: Step
    """A step on the mean of all labels' losses."""


def stock(model: Any, batch: Shared) -> Wanted:
    steps = []
    for loss_of in (lambda x: weighted(x, batch), lambda x: -x.sum() / count_of(batch)):
        mine = copy.deepcopy(model)
        log_probs, logits = apart(mine, batch)
        loss = loss_of(log_probs)
        loss.backward()
        steps.append(Step(loss.detach(), gradients(mine)))
    return Wanted(log_probs.detach(), logits.detach(), *steps)


def count_of(batch: Shared) -> int:
    return int((batch.given["labels"][:, 1:] != IGNORED).sum())
