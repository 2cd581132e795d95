"""Finds where the assistant speaks in a conversation whose template doesn't mark it.

A turn of the assistant is all that the template writes after the prompt that asks for it
(`add_generation_prompt`): its words, its calls, its thinking where the template writes it, and the
token that ends it with what the template writes after that, such as a newline. The conversation is
rendered up to each turn and through it. Where the whole conversation begins with both, in text and
in tokens, the turn lies between them.

Some templates write a turn in another way once others follow: Qwen3 leaves out thinking, gpt-oss
ends the turn with another token. Its end is then found with another text in place of its content:
what follows this text where the turn is the last one ends the turn, and the rest has to be the rest
of the conversation.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longctx_patch.recipes.data.records import BadRecord, Record

Message = Mapping[str, Any]
Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool], str]
"""The text of messages, and whether they end the text; else the assistant is about to answer."""
OTHER_TEXT = "Zq7xj"
"""Letters that no conversation has, and no template changes."""
SHOWN = 40
"""Characters shown of texts that differ."""
_FIX = (
    "The template doesn't mark the assistant's tokens, so they are found by comparing what it "
    "writes of parts of a conversation. Put {% generation %} and {% endgeneration %} around what "
    "the assistant says, the end of the turn included, and give the file (--chat-template FILE); "
    "or learn all tokens (assistant_only_loss: false; `longctx patch --train-on all`); or give "
    "prompt and completion in each record."
)


@dataclass(frozen=True)
class Conversation:
    """A conversation, and what its template writes of it."""

    record: Record
    messages: Sequence[Message]
    text: str
    render: Render
    tokenizer: Any
    added: Mapping[str, int]
    """The tokens that the tokenizer has added, which part what it reads."""

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.added.values())

    def turns(self, ids: Sequence[int], offsets: Sequence[Span]) -> list[Span]:
        """Returns where in the text each of the assistant's turns is.

        `ids`, `offsets`: the tokens of the text and where each is in it. Raises BadRecord for a
        turn that is not found, with what differs.
        """
        found: list[Span] = []
        for place, message in enumerate(self.messages):
            if message.get("role") != "assistant":
                continue
            try:
                span = self._turn(place)
                for border in span:
                    self._check_border(border, ids, offsets)
                if found and span[0] < found[-1][1]:
                    raise _NotFoundError("it begins in the turn before.")
            except (_NotFoundError, BadRecord) as error:
                why = str(error).removeprefix(f"{self.record.place}: ")
                raise self.record.refused(
                    f"the assistant's turn in message {place + 1} is not found: {why} {_FIX}"
                ) from error
            found.append(span)
        return found

    def _turn(self, place: int) -> Span:
        before = self.render(self.messages[:place], False)
        if not self.text.startswith(before):
            raise _NotFoundError(
                f"asked for it, the template writes {_difference(before, self.text)}."
            )
        through = self.render(self.messages[: place + 1], True)
        if self.text.startswith(through):
            return len(before), len(through)
        closed = through.removesuffix(self.tokenizer.eos_token)  # which may end conversations alone
        if self.text.startswith(closed) and closed.rstrip().endswith(tuple(self.added)):
            return len(before), len(closed)
        stop = self._end_by_other_text(place, len(before))
        if stop is None:
            raise _NotFoundError(
                f"where it is the last turn, the template writes {_difference(through, self.text)}."
            )
        return len(before), stop

    def _end_by_other_text(self, place: int, start: int) -> int | None:
        """The end of a turn that the template writes in another way where it is the last."""
        content: Any = OTHER_TEXT
        if isinstance(self.messages[place].get("content"), list):
            content = [{"type": "text", "text": OTHER_TEXT}]
        others = [*self.messages]
        others[place] = {**self.messages[place], "content": content}
        whole, alone = self.render(others, True), self.render(others[: place + 1], True)
        if whole.count(OTHER_TEXT) != 1 or alone.count(OTHER_TEXT) != 1:
            return None
        ending, rest = (text.partition(OTHER_TEXT)[2] for text in (alone, whole))
        others_after = self._without_ending(place, ending, rest)
        if others_after is None or whole[:start] != self.text[:start]:
            return None
        if not self.text.endswith(others_after):
            return None
        stop = len(self.text) - len(others_after)
        return stop if stop > start else None

    def _without_ending(self, place: int, ending: str, rest: str) -> str | None:
        """Returns what follows the turn. Where others follow, another token may end it: the one
        that ends the message before it."""
        if rest.startswith(ending):
            return rest[len(ending) :]
        last = max(self.added, key=lambda token: (ending.rfind(token), len(token)), default="")
        words, found, blanks = ending.rpartition(last) if last else ("", "", "")
        if not found or not rest.startswith(words):
            return None
        before = self.render(self.messages[:place], True)
        tokens = (
            t for t in sorted(self.added, key=len, reverse=True) if before.endswith(t + blanks)
        )
        other = words + next(tokens, last) + blanks
        return rest[len(other) :] if rest.startswith(other) else None

    def _check_border(self, border: int, ids: Sequence[int], offsets: Sequence[Span]) -> None:
        """Refuse a border that tokens merge across: the text before it, alone, would be others.

        Added tokens part the text that is tokenised, so that what follows the last one is enough.
        """
        stop = bisect_left(offsets, border, key=lambda span: span[0])
        start = next((n for n in range(stop - 1, -1, -1) if ids[n] in self._added_ids), 0)
        begin = offsets[start][0] if start else 0
        text = self.text[begin:border]
        alone = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if alone != list(ids[start:stop]):
            ends = self.tokenizer.convert_ids_to_tokens(alone[-3:])
            whole = self.tokenizer.convert_ids_to_tokens(ids[max(start, stop - 2) : stop + 1])
            raise _NotFoundError(
                f"tokens merge across its border: the text before it ends in {ends}, and the whole "
                f"conversation has {whole}."
            )


class _NotFoundError(Exception):
    """Says why a turn is not found."""


def _difference(part: str, whole: str) -> str:
    """Returns what a part of a conversation has where the whole of it has something else."""
    pairs = enumerate(zip(part, whole, strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(len(part), len(whole)))
    shown = slice(max(0, same - SHOWN // 4), same + SHOWN)
    return f"{part[shown]!r}, and in the whole conversation {whole[shown]!r}"
