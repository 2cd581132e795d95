"""The user's own questions: a JSONL file of contexts, questions and answers.

Each line is `{"context": ..., "question": ..., "answers": ...}`; `answers` is a text, or a list of
texts of which each is right. The prompt is the context, an empty line, `Question: ...`, and
`Answer:` on the next line; an answer follows after a space.

With the wrong answers beside them, in `"wrong": [...]`, or among all of them in `"choices": [...]`,
right ones are to be more likely than wrong ones (`ranked`). Without, greedy decoding has to begin
with one of the right answers, word by word (`forced`).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longctx_patch.evaluation.tasks.encoder import Encoder
from longctx_patch.evaluation.tasks.materials import Record, records
from longctx_patch.evaluation.tasks.sample import Sample

TASK = "questions"
PROMPT = "{context}\n\nQuestion: {question}\nAnswer:"
FIELDS = ("context", "question", "answers", "wrong", "choices")


def read_questions(path: Path, tokenizer: Any, length: int) -> list[Sample]:
    """A sample for each line, with `length` as the longest row.

    Raises ValueError with file and line: for fields of another form, and for a question that has
    more tokens than `length` with its longest answer.

    Example:
        >>> read_questions(Path("questions.jsonl"), tokenizer, 65536)  # doctest: +SKIP
    """
    encoder = Encoder(tokenizer)
    made = [_sample(record, encoder, length) for record in records(Path(path))]
    if not made:
        raise ValueError(f"{path}: the file has no question. Give one a line.")
    return made


def _sample(record: Record, encoder: Encoder, length: int) -> Sample:
    if unknown := set(record.fields) - set(FIELDS):
        raise record.error(f"no field {min(unknown)!r} is read: these are {', '.join(FIELDS)}.")
    answers, wrong = _answers(record)
    text = PROMPT.format(context=record.text("context"), question=record.text("question"))
    prompt = encoder.prompt(text, (), record.place)
    right, others = (
        tuple(encoder.answers(text, [f" {each}"], record.place)[0] for each in given)
        for given in (answers, wrong)
    )
    sample = partial(Sample, task=TASK, length=length, depth=None, prompt=prompt)
    if others:
        found = sample(answers=right, others=others, scoring="ranked")
    else:
        found = sample(answers=right[:1], spellings=tuple((each,) for each in right[1:]))
    if found.num_tokens > length:
        raise record.error(
            f"the question and its longest answer have {found.num_tokens:,} tokens, and the "
            f"longest row has {length:,}. Shorten the context, or take a greater length."
        )
    return found


def _answers(record: Record) -> tuple[list[str], list[str]]:
    """The right ones and the wrong ones."""
    right = _texts(record, "answers")
    if not right:
        raise record.error("'answers' is to be a text, or a list of texts, one or more.")
    wrong, choices = _texts(record, "wrong"), _texts(record, "choices")
    if choices:
        if wrong:
            raise record.error("'wrong' and 'choices' say the same: give one of them.")
        if missing := [each for each in right if each not in choices]:
            raise record.error(f"the answer {missing[0]!r} is not among the choices.")
        wrong = [each for each in choices if each not in right]
        if not wrong:
            raise record.error("all choices are right, so any model would be.")
    if both := [each for each in wrong if each in right]:
        raise record.error(f"the answer {both[0]!r} is right and wrong.")
    return right, wrong


def _texts(record: Record, name: str) -> list[str]:
    value = record.fields.get(name, [])
    texts: Sequence[Any] = [value] if isinstance(value, str) and name == "answers" else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t.strip() for t in texts):
        raise record.error(f"{name!r} is to be a list of texts that are not empty.")
    if len(set(texts)) < len(texts):
        raise record.error(f"{name!r} has a text twice.")
    return list(texts)
