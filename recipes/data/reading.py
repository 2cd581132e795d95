"""Rows of tokens from records: what the model reads, and which of its tokens it learns.

Tokens, masks and ends of text are those that TRL's SFTTrainer and DPOTrainer make of the same
records (trl/trainer/sft_trainer.py, `_prepare_dataset`); here each record's troubles have a place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.recipes.data.conversations import Template, is_conversation, messages_of
from longctx_patch.recipes.data.losses import EMPTY, Losses
from longctx_patch.recipes.data.records import (
    CHAT_FIELDS,
    FIELDS,
    TEXT_FILE,
    Kind,
    Record,
    TooLong,
    is_empty_file,
    kind_of,
)
from longctx_patch.recipes.data.roles import check_roles, check_weights, with_roles
from longctx_patch.recipes.data.specials import Specials
from longctx_patch.recipes.data.turns import Message
from longctx_patch.recipes.data.windows import ids_of_text

Ids = list[int]
CUT_OFF = "what is beyond a row's end (too_long: cut)"
SPECIALS = (
    "special tokens that records write themselves, and that are read as real ones "
    "(--split-special-tokens reads them as letters)"
)
NO_TARGET = "pieces in which nothing is learned (too_long: split)"
Row = dict[str, Any]
"""`input_ids` and `labels` of SFT; `prompt_ids`, `chosen_ids` and `rejected_ids` of DPO."""


@dataclass(frozen=True)
class Reading:
    """Says how records become rows."""

    tokenizer: Any
    kind: Kind
    """What all records hold."""
    seq_len: int
    too_long: TooLong = "refuse"
    text_field: str = "text"
    assistant_only: bool = False
    completion_only: bool = True
    may_leave_out: tuple[str, ...] = ()
    """Fields of messages that the chat template need not write."""
    split_special_tokens: bool = False
    """Whether special tokens that records write themselves are read as letters."""
    vocab_size: int | None = None
    """Ids are below; None: not checked."""

    @property
    def columns(self) -> dict[str, str]:
        """Types of a row's fields."""
        names: tuple[str, ...] = ("input_ids", "labels")
        if self.kind == "preference":
            names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return dict.fromkeys(names, "tokens")

    def rows_of(self, records: Iterable[Record], losses: Losses) -> Iterator[Row]:
        """The rows of records, in order; `losses` counts what is in none. Raises BadRecord."""
        for record in records:
            losses.num_records += 1
            yield from self.rows(record, losses)

    def rows(self, record: Record, losses: Losses) -> Iterator[Row]:
        """The rows of a record; several if it is split. Raises BadRecord."""
        if is_empty_file(record):
            losses.leave_out(record, EMPTY)
            return
        record = with_roles(record)
        found = kind_of(record, self.text_field)
        if found != self.kind:
            raise record.refused(
                f"a record with {FIELDS[found]}, among those with {FIELDS[self.kind]}. Give "
                "sources whose records are alike."
            )
        if found == "preference":
            self._note_specials(record, losses)
            yield self._pair(record, losses)
            return
        if found == "text" and not self._text(record):
            losses.leave_out(record, EMPTY)
            return
        self._note_specials(record, losses)
        ids, labels = self._tokens(record, losses)
        self._check_ids(record, "input_ids", ids)
        if labels is not ids:
            self._check_ids(record, "labels", labels, ignored=IGNORE_INDEX)
        if not num_learned(labels):
            why = self._why_nothing(ids, labels)
            raise record.refused(
                f"none of its {len(ids)} tokens is learned, since {why}. Leave it out."
            )
        yield from self._fitted(record, ids, labels, losses)

    def _why_nothing(self, ids: list[int], labels: list[int]) -> str:
        if self.kind == "tokens" and len(ids) > 1:
            ignored = f"all its labels are {IGNORE_INDEX}"
            if labels[0] == IGNORE_INDEX:
                return ignored
            return f"{ignored} but that of the first, which no token precedes"
        return "the assistant says nothing" if self.assistant_only else "it is too short"

    @cached_property
    def _specials(self) -> Specials:
        return Specials(self.tokenizer)

    @cached_property
    def template(self) -> Template:
        """Returns how conversations become text. Raises ValueError for unfit templates."""
        return Template.of(
            self.tokenizer,
            assistant_only=self.assistant_only,
            may_leave_out=self.may_leave_out,
            split_special_tokens=self.split_special_tokens,
        )

    def _note_specials(self, record: Record, losses: Losses) -> None:
        if self.split_special_tokens or self.kind == "tokens":
            return
        names = {*CHAT_FIELDS, *("tools", "prompt", "completion", "chosen", "rejected")}
        texts = [record.fields.get(name) for name in {*names, TEXT_FILE, self.text_field}]
        end = self.tokenizer.eos_token  # which may end a text
        texts = [text.removesuffix(end) if isinstance(text, str) else text for text in texts]
        if number := self._specials.count(texts):
            losses.note(record, SPECIALS, number)

    def _tokens(self, record: Record, losses: Losses) -> tuple[Ids, Ids]:
        """`input_ids` and `labels` of all of a record."""
        fields = record.fields
        if self.kind == "tokens":
            ids = _ids(record, "input_ids")
            given = fields.get("labels")
            labels = ids if given is None else _ids(record, "labels")
            if len(labels) != len(ids):
                raise record.refused(f"{len(labels)} labels for {len(ids)} input_ids.")
            return ids, labels
        if self.kind == "text":
            ids = self._of_ended(record, self._text(record))
            return ids, ids
        start = 0
        if self.kind == "chat":
            messages = self._messages(record, "messages")
            ids, learned = self.template.tokens(record, messages, losses=losses)
        else:
            prompt, ids, learned = self._completion(record, "completion", losses)
            start = _common_prefix(prompt, ids) if self.completion_only else 0
        places = enumerate(zip(ids, learned, strict=True))
        return ids, [i if yes and n >= start else IGNORE_INDEX for n, (i, yes) in places]

    def _messages(self, record: Record, field: str, *, learned: bool = True) -> list[Message]:
        """The messages in a field. `learned`: whether its turns are to be learned."""
        messages = messages_of(record, field)
        if self.kind != "chat" or self.assistant_only:
            template = self.template.text or self.tokenizer.chat_template
            check_roles(record, field, messages, template)
        if learned:
            check_weights(record, field, messages, assistant_only=self.assistant_only)
        return messages

    def _completion(
        self, record: Record, field: str, losses: Losses
    ) -> tuple[Ids, Ids, list[bool]]:
        """(ids of the prompt alone, ids of both, which of these are learned as such)."""
        prompt, answer = record.fields.get("prompt"), record.fields[field]
        if is_conversation(answer):
            before = self._messages(record, "prompt", learned=not self.completion_only)
            after = self._messages(record, field)
            alone, _ = self.template.tokens(record, before, ends=False)
            both = [*before, *after]
            may_be_empty = field != "completion"
            return alone, *self.template.tokens(
                record, both, may_be_empty=may_be_empty, losses=losses
            )
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise record.refused(
                f"prompt and {field} must both be texts, or both lists of messages."
            )
        if field == "completion" and not answer.strip():
            raise record.refused(
                "completion is empty, so the model would learn to end at once. Leave it out."
            )
        ids = self._of_ended(record, prompt, answer)
        return self._of_text(record, prompt), ids, [True] * len(ids)

    def _pair(self, record: Record, losses: Losses) -> Row:
        """A row of DPO: what comes after the tokens that prompt and both answers begin with."""
        from trl.data_utils import extract_prompt

        if record.fields.get("prompt") is None:
            for name in ("chosen", "rejected"):
                if is_conversation(record.fields[name]):
                    self._messages(record, name, learned=False)
            record = record._replace(fields=extract_prompt(dict(record.fields)))
            if not record.fields["prompt"]:
                raise record.refused(
                    "chosen and rejected begin differently, so that they have no prompt in common. "
                    "Give both the same prompt, or a field `prompt`."
                )
        prompt, chosen, _ = self._completion(record, "chosen", losses)
        _, rejected, _ = self._completion(record, "rejected", Losses())
        start = min(_common_prefix(prompt, chosen), _common_prefix(prompt, rejected))
        for name, ids in (("chosen", chosen), ("rejected", rejected)):
            self._check_ids(record, name, ids)
            if len(ids) == start:
                raise record.refused(f"{name} adds no token to the prompt.")
        longest = max(len(chosen), len(rejected))
        if longest > self.seq_len:
            fix = ": a pair can't be cut. Leave it out, or give more (--seq-len)."
            raise record.too_long(longest, self.seq_len, fix)
        return {
            "prompt_ids": prompt[:start],
            "chosen_ids": chosen[start:],
            "rejected_ids": rejected[start:],
        }

    def _fitted(self, record: Record, ids: Ids, labels: Ids, losses: Losses) -> Iterator[Row]:
        """Rows of `seq_len` tokens at most, those in which nothing is learned left out."""
        if len(ids) > self.seq_len and self.too_long == "refuse":
            fix = (
                ". Give more (--seq-len), or say what to do by the setting too_long: cut "
                "(--too-long cut drops the end) or split (--too-long split makes several rows)."
            )
            raise record.too_long(len(ids), self.seq_len, fix)
        stop = len(ids) if self.too_long == "split" else min(self.seq_len, len(ids))
        pieces = [slice(start, start + self.seq_len) for start in range(0, stop, self.seq_len)]
        rows = [piece for piece in pieces if num_learned(labels[piece])]
        lost = len(ids) - sum(len(ids[row]) for row in rows)
        if not rows:
            losses.leave_out(record, self._why_left_out(), lost, num_learned(labels))
        elif lost:
            why = CUT_OFF if self.too_long == "cut" else NO_TARGET
            losses.cut(record, why, lost, sum(label != IGNORE_INDEX for label in labels[stop:]))
        for row in rows:
            yield {"input_ids": ids[row], "labels": labels[row]}

    def _why_left_out(self) -> str:
        where = f"their first {self.seq_len:,} tokens" if self.too_long == "cut" else "any piece"
        return f"nothing is learned in {where} (too_long: {self.too_long})"

    def _text(self, record: Record) -> str:
        found: str = record.fields.get(TEXT_FILE, record.fields.get(self.text_field))
        return found

    def _of_text(self, record: Record, text: str) -> Ids:
        if self.split_special_tokens:
            return self._specials.letters(record, text)
        return ids_of_text(text, self.tokenizer, special=True)

    def _of_ended(self, record: Record, text: str, answer: str | None = None) -> Ids:
        """The tokens of a text, and of what follows it, with the end of texts."""
        end = self.tokenizer.eos_token
        last, text = (text, text) if answer is None else (answer, text + answer)
        if self.split_special_tokens:  # an end that the text has is letters
            return [*self._of_text(record, text), self.tokenizer.eos_token_id]
        return self._of_text(record, text if last.endswith(end) else text + end)

    def _check_ids(self, record: Record, name: str, ids: Ids, *, ignored: int = 0) -> None:
        """Refuse ids that the model has no weights for, whether they are learned or not.

        `ignored`: an id that stands for none.
        """
        array = np.asarray(ids)
        beyond = False if self.vocab_size is None else array >= self.vocab_size
        (wrong,) = np.nonzero((array != ignored) & ((array < 0) | beyond))
        if len(wrong):
            raise record.refused(
                f"{name}[{wrong[0]}] is {ids[wrong[0]]}, and the model has vocab_size="
                f"{self.vocab_size}. The data was tokenised for another model, or the tokenizer is "
                "another model's."
            )


def num_learned(labels: Ids) -> int:
    """Tokens that are predicted: labels, but for the first of a row."""
    return sum(label != IGNORE_INDEX for label in labels[1:])


def _ids(record: Record, field: str) -> Ids:
    found = record.fields[field]
    if not isinstance(found, list):
        raise record.refused(f"{field} is {str(found)[:60]!r}: give a list of whole numbers.")
    for place, each in enumerate(found):
        if type(each) is not int:
            raise record.refused(
                f"{field}[{place}] is {str(each)[:60]!r} of type {type(each).__name__}: give a "
                "list of whole numbers."
            )
    return found


def _common_prefix(ids: Ids, others: Ids) -> int:
    """Counts how many tokens both begin with: templates may end a prompt in another way than they
    go on from it."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))
