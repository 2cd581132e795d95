"""How long the documents of a run's rows are, from the first of its text."""

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import NamedTuple

import numpy as np

from longctx_patch.data import pack_rows
from longctx_patch.recipes import models, texts
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.documents import Documents

TYPICAL_TOKENS = 2048
"""Tokens of a document where no text says how long they are."""
MOST_DOCUMENTS, MOST_TOKENS = 512, 2**20
"""No more of the text is looked at."""
NUM_ROWS, PACKED_ROWS = 2, 4
"""Rows that are looked at, of those that are packed."""
PIECE = 2**17
"""Characters that are tokenised at once: of a long document only the first matter."""


class RowSample(NamedTuple):
    """Some rows of a run."""

    lengths: list[tuple[int, ...]]
    """The lengths of each row's documents; none for rows that are not packed."""
    assumed: str = ""
    """Why lengths were assumed, if the text did not say."""

    def describe(self) -> str:
        """Such as `rows of 64 documents`."""
        counts = sorted({len(lengths) for lengths in self.lengths})
        return f"rows of {' or '.join(map(str, counts))} documents"


def sample_rows(settings: Settings, *, has_text: bool) -> RowSample:
    """Full rows of documents as long as the first of the text."""
    if not settings.pack:
        return RowSample([()])
    why = "--data would tell"
    if has_text:
        try:
            found = list(_first_lengths(settings))
        except (ValueError, OSError, ImportError) as error:
            why = f"the text can't be read as it is ({' '.join(str(error).split())})"
        else:
            if found:
                return RowSample(_packed(found, settings.seq_len))
            why = "the text is empty"
    return RowSample([Documents.typical(settings.seq_len, TYPICAL_TOKENS).lengths], why)


def _first_lengths(settings: Settings) -> Iterator[int]:
    """Tokens of each of the first documents, a row's at most."""
    tokenizer, total = models.load_tokenizer(settings), 0
    most = min(settings.seq_len, MOST_TOKENS)
    documents = texts.read_documents(settings.text, settings.text_field)
    for document in islice(documents, MOST_DOCUMENTS):
        length = 0
        for start in range(0, len(document), PIECE):
            length += len(texts.tokens_of(document[start : start + PIECE], tokenizer))
            if length >= most:
                break
        yield min(length, most)
        total += length
        if total >= MOST_TOKENS:
            return


def _packed(lengths: list[int], seq_len: int) -> list[tuple[int, ...]]:
    """Some rows that the recipe would make of documents as long, again and again."""
    times = ceil(PACKED_ROWS * seq_len / sum(lengths))
    documents = ({"input_ids": np.zeros(n, np.int32)} for n in times * lengths)
    rows = [tuple(row["seq_lengths"]) for row in pack_rows(documents, seq_len)]
    full = rows[:-1] or rows  # the last one has what is left
    return full[:: ceil(len(full) / NUM_ROWS)]
