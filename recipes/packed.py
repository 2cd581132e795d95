"""Documents packed into rows; documents of a row don't see each other."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from longctx_patch.data import pack_rows

from .texts import NO_TEXT, tokens_of


class PackedText(NamedTuple):
    """Rows of several documents, and how well they are filled."""

    rows: list[np.ndarray]
    """int32 tokens, of `seq_len` at most."""
    seq_lengths: list[list[int]]
    """Lengths of the documents in each row."""
    efficiency: float
    """Share of real tokens in the rows, each counted as `seq_len` long."""
    summary: str


def pack_documents(documents: Iterable[str], tokenizer: Any, *, seq_len: int) -> PackedText:
    """Fill rows of `seq_len` tokens, best fit first; each document is closed by the eos token.

    A document longer than a row is cut into documents of `seq_len` tokens and a rest. They don't
    see each other, and the first token after a cut is not predicted. A row in which nothing is
    predicted (a rest of one token that fitted into no other row) is left out.

    Every process computes the same rows. Raises ValueError without any text.
    """
    streams = [tokens_of(document, tokenizer) for document in documents]
    packed = pack_rows([{"input_ids": tokens} for tokens in streams], seq_len, too_long="split")
    kept = [
        (row["input_ids"].numpy().astype(np.int32), row["seq_lengths"])
        for row in packed
        if max(row["seq_lengths"]) > 1
    ]
    if not kept:
        raise ValueError(NO_TEXT)
    rows, seq_lengths = map(list, zip(*kept, strict=True))
    efficiency = sum(map(len, rows)) / (len(rows) * seq_len)
    summary = (
        f"packed {len(streams):,} documents into {len(rows):,} rows, {efficiency:.1%} full; "
        f"longer than a row, so split: {packed.num_split:,}"
    )
    return PackedText(rows, seq_lengths, efficiency, summary)
