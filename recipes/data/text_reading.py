"""Documents of plain text as tokens, each closed by the eos token.

A document is a record's field of text, or a whole text file. A long one is several rows of a table,
so that a writer never holds much; where rows of training are cut is decided later, from lengths.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx_patch.recipes.data.losses import EMPTY, Losses
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.records import (
    CHAT_FIELDS,
    TEXT_FILE,
    Record,
    names_of_texts,
    no_text,
)
from longctx_patch.recipes.data.sources import parts_of
from longctx_patch.recipes.data.windows import WINDOW, ids_without_special

PIECE_TOKENS = 2**14
"""Most tokens in a row of the table."""
BATCH_CHARACTERS = 2**20
"""A tokenizer gets documents of so many together: one by one they take longer."""


@dataclass(frozen=True)
class TextReading:
    """Says how documents become rows of a table."""

    tokenizer: Any
    text_field: str = "text"

    @property
    def columns(self) -> dict[str, str]:
        return {"input_ids": "tokens", "ends": "bool", "digest": "int64"}

    def rows_of(self, records: Iterable[Record], losses: Losses) -> Iterator[dict[str, Any]]:
        """`input_ids`, whether the document `ends` with them, and their `digest`. `losses` counts
        empty documents.

        Raises BadRecord for a record without text.
        """
        for batch in _batches(self._texts(records, losses)):
            for ids in tokens_of(batch, self.tokenizer):
                yield from self._pieces(ids)

    def _texts(self, records: Iterable[Record], losses: Losses) -> Iterator[str]:
        for record in records:
            losses.num_records += 1
            if text := text_of(record, self.text_field):
                yield text
            else:
                losses.leave_out(record, EMPTY)

    def _pieces(self, ids: np.ndarray) -> Iterator[dict[str, Any]]:
        for start in range(0, len(ids), PIECE_TOKENS):
            piece = ids[start : start + PIECE_TOKENS]
            digest = hashlib.blake2b(piece.tobytes(), digest_size=8).digest()
            yield {
                "input_ids": piece,
                "ends": start + PIECE_TOKENS >= len(ids),
                "digest": int.from_bytes(digest, "little", signed=True),
            }


def tokens_of(documents: Sequence[str], tokenizer: Any) -> list[np.ndarray]:
    """int32 tokens of each document and the eos token."""
    ends = np.array([tokenizer.eos_token_id], np.int32)
    if any(len(document) > WINDOW for document in documents) and tokenizer.is_fast:
        whole = [ids_without_special(document, tokenizer) for document in documents]
        return [np.concatenate([ids, ends]) for ids in whole]
    found = tokenizer(
        list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [np.array([*ids, *ends], np.int32) for ids in found["input_ids"]]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def documents_of(sources: Sequence[str], text_field: str) -> Iterator[str]:
    """The documents of all sources in order: sources as given, files of a folder or glob sorted.

    Raises ValueError for a source that is not there, or a record without text.
    """
    for source in sources:
        for part in parts_of(source):
            for record in records_of(part):
                if text := text_of(record, text_field):
                    yield text


def text_of(record: Record, text_field: str) -> str:
    """The record's text, which may be empty. Raises BadRecord for a record without any."""
    found = record.fields.get(TEXT_FILE, record.fields.get(text_field))
    if not isinstance(found, str):
        raise record.refused(_why_no_text(record.fields, text_field))
    return found


def _why_no_text(fields: Mapping[str, Any], text_field: str) -> str:
    found = no_text(fields, text_field)
    if {*CHAT_FIELDS, "conversation", "input_ids", "prompt", "chosen"} & fields.keys():
        return (
            f"{found} This recipe trains on plain text. Conversations, completions, pairs and rows "
            "of tokens are for longctx_patch.recipes.sft and .dpo, whose run folder `longctx patch "
            "--data` writes."
        )
    if text_field in fields:
        return f"{found} Give each record a text (an empty one is no document)."
    texts = names_of_texts(fields)
    if not texts:
        return f"{found} None of them holds text. Give records with a field of text."
    return (
        f"{found} Give --text-field NAME, for example --text-field {texts[0]}; or leave the file "
        "out, for example with a glob: 'folder/**/*.txt'"
    )
