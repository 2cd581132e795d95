"""Special tokens that records write themselves, such as `<|im_end|>` in what a user says.

A tokenizer reads them as the real ones, which end turns and open others. They are counted, and with
`split_special_tokens` they are read as the letters that they are, while those of the chat template
stay what they are: a mark is put into each before the conversation is rendered, and taken out of
the pieces of the text that have one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from longctx_patch.recipes.data.records import Record

MARK = "\ue0f1"
"""A character of Unicode's private use, which no text has."""
Span = tuple[int, int]


class Tokens(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    offsets: list[Span]


@dataclass(frozen=True)
class Specials:
    """The special tokens of a tokenizer."""

    tokenizer: Any

    @cached_property
    def _ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        found = frozenset(number for number, token in added if token.special)
        return found - {self.tokenizer.unk_token_id}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = {self.tokenizer.added_tokens_decoder[number].content for number in self._ids}
        longest = sorted(words, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def count(self, value: Any) -> int:
        """Counts how many there are in a text, or in the texts of a record's field."""
        return sum(len(self._pattern.findall(text)) for text in _texts(value))

    def marked(self, record: Record, value: Any) -> Any:
        """The same messages, tools or text, with a mark in each. Raises BadRecord if it has marks
        of its own."""
        if any(MARK in text for text in _texts(value)):
            raise record.refused(
                f"it has the character {MARK!r}, which split_special_tokens needs. Leave it out."
            )
        return self._marked(value)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][:1] + MARK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._marked(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(each) for each in value]
        return value

    def without_marks(self, record: Record, text: str, tokens: Tokens) -> Tokens:
        """The tokens of a text once marks are out of it: what was marked is read as letters.

        `tokens`: those of the text with its marks. Raises BadRecord where a tokenizer reads a piece
        in another way when it stands alone.
        """
        ids: list[int] = []
        offsets: list[Span] = []
        real = [n for n, token in enumerate(tokens.ids) if token in self._ids]
        edges = [-1, *real, len(tokens.ids)]
        num_marks = 0
        for before, after in pairwise(edges):
            start = tokens.offsets[before][1] if before >= 0 else 0
            stop = tokens.offsets[after][0] if after < len(tokens.ids) else len(text)
            piece = Tokens(tokens.ids[before + 1 : after], tokens.offsets[before + 1 : after])
            if MARK in text[start:stop]:
                if self._alone(text[start:stop], 0).ids != piece.ids:
                    raise record.refused(
                        "split_special_tokens with a tokenizer that reads a piece of a text in "
                        "another way when it stands alone. Take the special tokens out of it."
                    )
                piece = self._alone(text[start:stop].replace(MARK, ""), start - num_marks)
                self._check(record, piece.ids)
            else:
                shifted = [(a - num_marks, b - num_marks) for a, b in piece.offsets]
                piece = Tokens(piece.ids, shifted)
            num_marks += text.count(MARK, start, stop)
            ids += piece.ids
            offsets += piece.offsets
            if after < len(tokens.ids):
                ids.append(tokens.ids[after])
                begin, end = tokens.offsets[after]
                offsets.append((begin - num_marks, end - num_marks))
        return Tokens(ids, offsets)

    def letters(self, record: Record, text: str) -> list[int]:
        """The tokens of a text in which all are letters, between those that the tokenizer adds."""
        found = self.tokenizer(
            text=text, return_special_tokens_mask=True, split_special_tokens=True, verbose=False
        )
        ids: list[int] = found["input_ids"]
        own = zip(ids, found["special_tokens_mask"], strict=True)
        self._check(record, [token for token, is_added in own if not is_added])
        return ids

    def _check(self, record: Record, ids: Sequence[int]) -> None:
        if wrong := self._ids & {*ids}:
            token = self.tokenizer.decode([*wrong])
            raise record.refused(
                f"split_special_tokens, and the tokenizer makes {token!r} of letters too. "
                "Take it out of the text."
            )

    def _alone(self, text: str, start: int) -> Tokens:
        found = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            split_special_tokens=True,
            verbose=False,
        )
        offsets = [(start + a, start + b) for a, b in found["offset_mapping"]]
        return Tokens(found["input_ids"], offsets)


def without_marks(text: str, spans: Sequence[Span]) -> list[Span]:
    """Returns where spans of a text are once marks are out of it."""
    return [(a - text.count(MARK, 0, a), b - text.count(MARK, 0, b)) for a, b in spans]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))
