"""Tokens of a text of any length, in bounded memory.

A tokenizer takes about 280 bytes for each character that it is given at once. So a long text is
tokenised by windows that overlap, and cut where both windows have the same tokens at the same
places: from there on they agree, as a tokenizer's choice depends on what is near. Where two windows
don't agree, they become one; at worst that is the whole text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

WINDOW, OVERLAP = 2**18, 2**12
"""Characters."""
NUM_AGREEING = 32
"""Tokens before and after a cut that have to be the same in both windows."""


class Tokens(NamedTuple):
    """Tokens, and where in the text they are."""

    ids: np.ndarray
    """int32"""
    offsets: np.ndarray
    """int64, first character and the one after the last, a row for each token."""

    def part(self, start: int, stop: int | None = None) -> "Tokens":
        return Tokens(self.ids[start:stop], self.offsets[start:stop])


def tokens_of_text(text: str, tokenizer: Any) -> Tokens:
    """The tokens of a text, no special ones added, as if it were tokenised at once.

    Needs a fast tokenizer, as others don't say where tokens are.
    """
    ids, offsets = zip(*_parts(text, tokenizer), strict=True)
    return Tokens(np.concatenate(ids), np.concatenate(offsets))


def _parts(text: str, tokenizer: Any) -> Iterator[Tokens]:
    """The same, part by part."""
    start, stop = 0, WINDOW
    held, edge = _tokens(text, start, stop, tokenizer), 0
    while stop < len(text):
        first, last = stop - OVERLAP, stop - OVERLAP + WINDOW
        after = _tokens(text, first, last, tokenizer)
        place = (first + stop) // 2
        if not _agree(held, after, place):
            first, place, last = start, edge, 2 * stop - start + WINDOW
            after = _tokens(text, first, last, tokenizer)
            if edge and not _agree(held, after, place, num_before=0):
                whole = _tokens(text, 0, len(text), tokenizer)
                yield whole.part(_at(whole, edge))
                return
        yield held.part(0, _at(held, place))
        held, start, edge, stop = after.part(_at(after, place)), first, place, last
    yield held


def ids_of_text(text: str, tokenizer: Any, *, special: bool) -> list[int]:
    """Returns what a tokenizer makes of a text, with its special tokens around it or without."""
    if len(text) <= WINDOW or not tokenizer.is_fast:
        found: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found
    ids = ids_without_special(text, tokenizer).tolist()
    sample, bare = (tokenizer("a", add_special_tokens=s)["input_ids"] for s in (special, False))
    before = next(n for n in range(len(sample)) if sample[n : n + len(bare)] == bare)
    return [*sample[:before], *ids, *sample[before + len(bare) :]]


def ids_without_special(text: str, tokenizer: Any) -> np.ndarray:
    """int32 tokens of a text, where a fast tokenizer alone is asked."""
    return np.concatenate([part.ids for part in _parts(text, tokenizer)])


def _tokens(text: str, start: int, stop: int, tokenizer: Any) -> Tokens:
    found = tokenizer(
        text[start:stop], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    offsets = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
    return Tokens(np.array(found["input_ids"], np.int32), offsets + start)


def _at(window: Tokens, place: int) -> int:
    """The number of the first token that begins at a place in the text, or after it."""
    return int(np.searchsorted(window.offsets[:, 0], place))


def _agree(before: Tokens, after: Tokens, place: int, *, num_before: int | None = None) -> bool:
    """Says whether two windows have the same tokens around a place."""
    num_before = NUM_AGREEING if num_before is None else num_before
    wanted, found = (
        window.part(max(0, _at(window, place) - num_before), _at(window, place) + NUM_AGREEING)
        for window in (before, after)
    )
    enough = len(wanted.ids) == num_before + NUM_AGREEING
    return enough and all(map(np.array_equal, wanted, found))
