"""Texts of tasks as token ids, such that the model's answer means what the task expects."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

TAIL = 200
"""Characters at the end of a prompt that are tokenized again with the answer. Tokens depend on
characters near them; if the last ones are not those of the whole prompt, all of it is."""
NUM_AGREEING = 8


class Encoder:
    """A tokenizer of transformers, without its special tokens but the one that begins a row."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        begin = tokenizer.bos_token_id
        has_begin = begin is not None and tokenizer("a").input_ids[:1] == [begin]
        self.head: tuple[int, ...] = (begin,) if has_begin else ()
        self._ids_of_last = lru_cache(maxsize=1)(self._tokenize)  # counted, then put into a sample

    def _tokenize(self, text: str) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(found.input_ids)

    def ids(self, text: str) -> list[int]:
        return self._ids_of_last(text)

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def prompt(self, text: str, values: Sequence[str], task: str) -> tuple[int, ...]:
        """Ids of a prompt. Raises ValueError if they don't have the `values` that the text has."""
        ids = self.ids(text)
        decoded = self.decode(ids).lower()
        for value in values:
            if value in text and value.lower() not in decoded:
                raise ValueError(
                    f"{task}: the tokenizer does not give back {value!r}, which the text hides: no "
                    "answer could be right. Give the model's own tokenizer (--tokenizer NAME), or "
                    "take another task."
                )
        return self.head + tuple(ids)

    def answers(self, text: str, parts: Sequence[str], task: str) -> tuple[tuple[int, ...], ...]:
        """Ids of the parts of an answer that follow a prompt.

        They are those of the joined text where the prompt's ids stay the same in it. Elsewhere
        they are those of the part by itself, if prompt and part have the joined text. Raises
        ValueError where neither holds.
        """
        whole = self.ids(text)
        before = self._tokenize(text[-TAIL:])
        start = text[-TAIL:]
        if before[-NUM_AGREEING:] != whole[-NUM_AGREEING:]:
            before, start = whole, text
        found = []
        for part in parts:
            wanted = (self.decode(before) + part).lower()
            joined = self._tokenize(start + part)
            ways = (joined, before + self._tokenize(part), before + self._tokenize(part.lstrip()))
            for joined in ways:
                if joined[: len(before)] == before and self.decode(joined).lower() == wanted:
                    break
            else:
                raise ValueError(
                    f"{task}: the tokenizer joins the prompt and the answer {part!r}, or does not "
                    "give it back, so it can't be scored token by token."
                )
            found.append(tuple(joined[len(before) :]))
            before, start = joined, start + part
        return tuple(found)
