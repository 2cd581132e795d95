"""The passkey test: five digits in a long text, at each of several depths.

By Mohtashami and Jaggi (2023, arXiv:2305.16300), with their haystack or a text of the user's own.
Its parts are tokenized one by one, so the key has the same tokens at each depth and length.
"""

from random import Random

from longctx_patch.evaluation.tasks.encoder import Encoder
from longctx_patch.evaluation.tasks.materials import NOISE, Sources
from longctx_patch.evaluation.tasks.sample import Sample

TASK = "passkey"
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAD = "There is an important pass key hidden inside a lot of text. Find it and remember it.\n"
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"


def passkeys(
    encoder: Encoder,
    length: int,
    per_depth: int,
    seed: int,
    depths: tuple[float, ...],
    sources: Sources,
) -> list[Sample]:
    """Samples of exactly `length` tokens, answer included."""
    random = Random(seed)
    return [
        _passkey(encoder, length, depth, random, sources)
        for depth in depths
        for _ in range(per_depth)
    ]


def _passkey(
    encoder: Encoder, length: int, depth: float, random: Random, sources: Sources
) -> Sample:
    key = "".join(random.choice("0123456789") for _ in range(5))
    head, needle, question = (
        encoder.prompt(part, [key], TASK) for part in (HEAD, NEEDLE.format(key=key), QUESTION)
    )
    needle, question = needle[len(encoder.head) :], question[len(encoder.head) :]
    answers = encoder.answers(QUESTION, [f" {key}"], TASK)
    num_fixed = sum(map(len, (head, needle, question, *answers)))
    if num_fixed >= length:
        raise ValueError(
            f"{TASK}: {length:,} tokens are too few, since the key and its question have "
            f"{num_fixed:,}. Take a greater length."
        )
    filler = _filler(encoder, length - num_fixed, random, sources)
    place = round(len(filler) * depth)
    return Sample(
        task=TASK,
        length=length,
        depth=depth,
        prompt=head + filler[:place] + needle + filler[place:] + question,
        answers=answers,
    )


def _filler(encoder: Encoder, num_tokens: int, random: Random, sources: Sources) -> tuple[int, ...]:
    text = sources.text
    if text is None:
        line = encoder.ids(f"{NOISE}\n")
        return tuple((line * (num_tokens // len(line) + 1))[:num_tokens])
    num_chars = 8 * num_tokens
    while True:
        start = random.randrange(max(1, len(text) - num_chars))
        found = encoder.ids(text[start : start + num_chars])
        if len(found) >= num_tokens:
            return tuple(found[:num_tokens])
        if num_chars >= len(text):
            raise ValueError(
                f"{TASK}: your text has {len(found):,} tokens, and the haystack takes "
                f"{num_tokens:,}. Give a longer text, or none for RULER's noise."
            )
        num_chars *= 2
