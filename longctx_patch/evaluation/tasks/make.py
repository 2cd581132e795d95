"""Samples of the tasks by name: which there are, how each is scored, and how it is made."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

from longctx_patch.evaluation.tasks.counted_words import (
    CommonWordGenerator,
    FrequentWordGenerator,
)
from longctx_patch.evaluation.tasks.document_questions import DocumentGenerator
from longctx_patch.evaluation.tasks.encoder import Encoder
from longctx_patch.evaluation.tasks.generator import Draw, Generator, Setup, too_short
from longctx_patch.evaluation.tasks.materials import Sources
from longctx_patch.evaluation.tasks.needles import NeedleGenerator, Needles
from longctx_patch.evaluation.tasks.passkey import DEPTHS, TASK, passkeys
from longctx_patch.evaluation.tasks.sample import Sample
from longctx_patch.evaluation.tasks.variables import VariableGenerator
from longctx_patch.rules.names import require_choice

SEED = 42
"""RULER's."""
MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Says how a task is scored, without generating.

    `forced` where the prompt leaves one way to go on, or the few of `leads`. `ranked` where order
    and wording are free: RULER looks for the answers anywhere in what is generated, which no
    single expected string equals.
    """

    leads: tuple[str, ...] = (" ",)
    """What may come between prompt and answer. Forced: each is a spelling."""
    num_ranked: int = 0
    """Ranked: right answers taken, in the order of the task, and as many wrong ones."""


_ONE_VALUE = Scored(leads=(" ", ": "))
_VALUES = Scored(num_ranked=4)


@dataclass(frozen=True, kw_only=True)
class Task:
    about: str
    generator: Callable[[Setup], Generator]
    scored: Scored
    has_depth: bool = False


def _niah(about: str, **needles: Any) -> Task:
    hidden = Needles(**needles)
    one = hidden.num_answers == 1
    return Task(
        about=about,
        generator=partial(NeedleGenerator, needles=hidden),
        scored=_ONE_VALUE if one else _VALUES,
        has_depth=one,
    )


RULER: dict[str, Task] = {
    "niah_single_1": _niah("a number in repeated noise", haystack="noise"),
    "niah_single_2": _niah("a number in essays", haystack="essays"),
    "niah_single_3": _niah("a UUID in essays", haystack="essays", values="uuids"),
    "niah_multikey_1": _niah("one of 4 numbers in essays", haystack="essays", num_keys=4),
    "niah_multikey_2": _niah("a number among needles only", haystack="needles"),
    "niah_multikey_3": _niah(
        "a UUID by a UUID, among needles only", haystack="needles", keys="uuids", values="uuids"
    ),
    "niah_multivalue": _niah("4 numbers of one key in essays", haystack="essays", num_values=4),
    "niah_multiquery": _niah(
        "the numbers of 4 keys in essays", haystack="essays", num_keys=4, num_asked=4
    ),
    "vt": Task(
        about="5 variables of one value, by a chain of assignments in noise",
        generator=VariableGenerator,
        # The solved example before the question goes on with a second space.
        scored=Scored(leads=(" ", "")),
    ),
    "cwe": Task(
        about="the 10 most common words of a list",
        generator=CommonWordGenerator,
        scored=Scored(leads=(" 1. ",), num_ranked=4),  # as the solved example begins
    ),
    "fwe": Task(
        about="the 3 most frequent codes of a text",
        generator=FrequentWordGenerator,
        scored=Scored(num_ranked=3),
    ),
    "qa_1": Task(
        about="a question of SQuAD, its paragraph among others",
        generator=lambda setup: DocumentGenerator(setup, setup.sources.squad_questions),
        scored=Scored(num_ranked=4),
    ),
    "qa_2": Task(
        about="a question of HotpotQA, its documents among others",
        generator=lambda setup: DocumentGenerator(setup, setup.sources.hotpotqa_questions),
        scored=Scored(num_ranked=4),
    ),
}

TASKS: dict[str, str] = {TASK: "five digits in noise or your text, at several depths"} | {
    name: task.about for name, task in RULER.items()
}
"""Names of all tasks, and what each asks for."""


def make_samples(
    names: Iterable[str],
    tokenizer: Any,
    length: int,
    per_cell: int = 10,
    seed: int = SEED,
    depths: Sequence[float] | None = None,
    sources: Sources | None = None,
) -> list[Sample]:
    """Samples of tasks at one length, the same for the same seed.

    `tokenizer` is the model's, of transformers. `length` is that of the longest row: prompt and
    room for the answer have as many tokens at most. Without `depths`, samples are RULER's, of which
    a task has `per_cell`; with them, a task that asks for one needle has `per_cell` at each depth
    from 0 to 1, also `passkey`, whose own depths are 5 to 95 %.

    Raises ValueError before the first sample is made for a task that does not exist, for numbers
    and files that don't fit and for packages that are missing, and while samples are made for a
    length that is too small and for a tokenizer that does not give back what a text hides.
    """
    names = tuple(dict.fromkeys(names))
    for name in names:
        require_choice("task", name, TASKS)
    _check_numbers(length, per_cell, depths)
    sources, encoder = sources or Sources(), Encoder(tokenizer)
    setups = {
        name: Setup(task=name, count=encoder.count, length=length, seed=seed, sources=sources)
        for name in names
    }
    generators = {name: RULER[name].generator(setups[name]) for name in names if name in RULER}
    made: list[Sample] = []
    for name in names:
        if name == TASK:
            at = tuple(depths or DEPTHS)
            made += passkeys(encoder, length, per_cell, seed, at, sources)
        else:
            made += _samples(RULER[name], generators[name], encoder, per_cell, depths)
    return made


def make_at_lengths(
    names: Iterable[str],
    tokenizer: Any,
    lengths: Iterable[int],
    per_cell: int,
    seed: int = SEED,
    depths: Sequence[float] | None = None,
    sources: Sources | None = None,
) -> list[tuple[str, Future[list[Sample]]]]:
    """Each task with its samples at each length, or what `make_samples` refused: length by length.

    Threads make them side by side, since tokenizers let go of Python's lock, and the time of a
    row of 128K tokens goes into tokenizing the haystacks that are tried for it.
    """
    names, sources = tuple(names), sources or Sources()
    pairs = list(product(lengths, names))
    if not pairs:
        return []
    # What threads share is ready before they start; each says itself what it lacks.
    Encoder(tokenizer)
    with suppress(ValueError):
        haystacks(names, sources)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        made = [
            pool.submit(make_samples, [name], tokenizer, length, per_cell, seed, depths, sources)
            for length, name in reversed(pairs)  # the longest take longest
        ]
    return [(name, future) for (_, name), future in zip(pairs, reversed(made), strict=True)]


def haystacks(names: Iterable[str], sources: Sources) -> dict[str, str]:
    """Returns what each task hides its needles in where that may differ: `own text`."""
    found = {}
    for name in names:
        if name == TASK:
            found[name] = "noise" if sources.text is None else "own text"
        elif name in RULER and "essays" in TASKS[name]:
            found[name] = sources.haystack.name
    return found


def _check_numbers(length: int, per_cell: int, depths: Sequence[float] | None) -> None:
    for name, value in (("length", length), ("per_cell", per_cell)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number, 1 or more.")
    for depth in depths or ():
        if not 0 <= depth <= 1:
            raise ValueError(f"depths={list(depths or ())}: give numbers from 0 to 1.")


def _samples(
    task: Task,
    generator: Generator,
    encoder: Encoder,
    per_cell: int,
    depths: Sequence[float] | None,
) -> list[Sample]:
    size, numbers = generator.find_size(), count()
    at = depths if depths is not None and task.has_depth else (None,)
    return [
        _sample(
            task.scored,
            generator.draw_fitting(size, next(numbers), depth, generator.room),
            generator.setup,
            encoder,
            depth,
        )
        for depth in at
        for _ in range(per_cell)
    ]


def _sample(
    scored: Scored, draw: Draw, setup: Setup, encoder: Encoder, depth: float | None
) -> Sample:
    prompt = encoder.prompt(draw.text, draw.answers, setup.task)

    def ids(*parts: str) -> tuple[tuple[int, ...], ...]:
        return encoder.answers(draw.text, parts, setup.task)

    if scored.num_ranked:
        right, wrong = (
            [ids(scored.leads[0] + value)[0] for value in values]
            for values in (draw.answers[: scored.num_ranked], draw.others)
        )
        others = _nearest_in_length(wrong, right, scored.num_ranked)
        if not others:
            raise too_short(setup, len(prompt))
        found = Sample(
            task=setup.task,
            length=setup.length,
            depth=None,
            prompt=prompt,
            answers=tuple(right),
            others=others,
            scoring="ranked",
        )
    else:
        first, *rest = draw.answers
        ways = [ids(lead + first, *(f" {value}" for value in rest)) for lead in scored.leads]
        found = Sample(
            task=setup.task,
            length=setup.length,
            depth=depth,
            prompt=prompt,
            answers=ways[0],
            spellings=tuple(way for way in ways[1:] if way != ways[0]),
        )
    if found.num_tokens > setup.length:
        raise ValueError(
            f"{setup.task}: the answer has {found.num_tokens - len(prompt):,} tokens with this "
            f"tokenizer, and {setup.length - len(prompt):,} are left in a row of {setup.length:,}. "
            "Leave this task out."
        )
    return found


def _nearest_in_length(
    wrong: list[tuple[int, ...]], right: list[tuple[int, ...]], num_taken: int
) -> tuple[tuple[int, ...], ...]:
    """Wrong answers with about as many tokens as the right ones, since a longer one is less likely
    for its length alone."""
    left, taken = list(dict.fromkeys(wrong)), []
    for number in range(min(num_taken, len(left))):
        wanted = len(right[number % len(right)])
        nearest = min(left, key=lambda ids: abs(len(ids) - wanted))
        left.remove(nearest)
        taken.append(nearest)
    return tuple(taken)
