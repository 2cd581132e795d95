"""How long the documents of a run's rows are, estimated from the first documents of its text."""

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

from longctx_patch.cli.run_recipe import first_kind
from longctx_patch.data import pack_lengths
from longctx_patch.recipes import models
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.sources import parts_of
from longctx_patch.recipes.data.text_reading import documents_of, tokens_of
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.documents import Documents

TYPICAL_TOKENS = 2048
"""Tokens of a document, assumed where no text says how long documents are."""
MOST_DOCUMENTS, MOST_TOKENS = 512, 2**20
"""At most so much of the text is read."""
NUM_ROWS, PACKED_ROWS = 2, 4
"""About how many rows the sample has, and from how many packed rows they are taken."""
PIECE = 2**17
"""Characters tokenised at a time: of a long document only the first `seq_len` tokens matter."""


class RowSample(NamedTuple):
    """Some rows of a run."""

    lengths: list[tuple[int, ...]]
    """The lengths of each row's documents; an empty tuple for a row that is not packed."""
    assumed: str = ""
    """Why lengths were assumed, if the text did not say."""

    def describe(self) -> str:
        """Such as `rows of 64 documents`."""
        counts = sorted({len(lengths) for lengths in self.lengths})
        return f"rows of {' or '.join(map(str, counts))} documents"


def sample_rows(settings: Settings, *, has_text: bool) -> RowSample:
    """Full rows, packed from documents that are as long as the first ones of the text."""
    if not settings.pack:
        return RowSample([()])
    if settings.mixture:  # a row of one document for each row of short ones
        short = Documents.typical(settings.seq_len, TYPICAL_TOKENS).lengths
        return RowSample([(settings.seq_len,), short], "of a mixture's short ones")
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
    """The number of tokens of each of the first documents, at most a row's."""
    tokenizer, total = models.load_tokenizer(settings), 0
    most = min(settings.seq_len, MOST_TOKENS)
    if first_kind(settings.text[0], settings.text_field) != "text":
        yield from islice(_lengths_of_records(settings, tokenizer), MOST_DOCUMENTS)
        return
    documents = documents_of(settings.text, settings.text_field)
    for document in islice(documents, MOST_DOCUMENTS):
        length = 0
        for start in range(0, len(document), PIECE):
            length += len(tokens_of([document[start : start + PIECE]], tokenizer)[0])
            if length >= most:
                break
        yield min(length, most)
        total += length
        if total >= MOST_TOKENS:
            return


def _lengths_of_records(settings: Settings, tokenizer: Any) -> Iterator[int]:
    """The same of conversations and the like."""
    for source in settings.text:
        kind = first_kind(source, settings.text_field)
        reading = Reading(
            tokenizer, kind, settings.seq_len, too_long="cut", text_field=settings.text_field
        )
        for part in parts_of(source):
            for record in records_of(part):
                yield from (len(row["input_ids"]) for row in reading.rows(record, Losses()))


def _packed(lengths: list[int], seq_len: int) -> list[tuple[int, ...]]:
    """Some of the rows that the recipe would pack from documents of these lengths, repeated."""
    times = ceil(PACKED_ROWS * seq_len / sum(lengths))
    lengths = times * lengths
    rows = [tuple(lengths[n] for n in row) for row in pack_lengths(lengths, seq_len)]
    full = rows[:-1] or rows  # the last row may not be full
    return full[:: ceil(len(full) / NUM_ROWS)]
