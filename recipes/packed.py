"""Documents packed into rows, in which none sees another."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx_patch.data import pack_rows

from .texts import NO_TEXT, tokens_of


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Rows of several documents, and what came of packing them."""

    rows: list[np.ndarray]
    """int32 tokens, of `seq_len` at most."""
    seq_lengths: list[list[int]]
    """Lengths of the documents in each row."""
    num_documents: int
    num_split: int
    """Documents longer than a row, which became several."""
    efficiency: float
    """Share of real tokens in the rows, each counted as `seq_len` long."""

    def __str__(self) -> str:
        return (
            f"packed {self.num_documents:,} documents into {len(self.rows):,} rows, "
            f"{self.efficiency:.1%} full; longer than a row, so split: {self.num_split:,}"
        )


def pack_documents(documents: Iterable[str], tokenizer: Any, *, seq_len: int) -> PackedText:
    """Fill rows of `seq_len` tokens, best fit first; each document is closed by the eos token.

    A document longer than a row is cut into documents of `seq_len` tokens and a rest. They don't
    see each other, and nobody learns the first token after a cut. A row that has nothing to learn
    (the rest of such a document, of one token, that fitted nowhere) is left out.

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
    return PackedText(
        rows=rows,
        seq_lengths=seq_lengths,
        num_documents=len(streams),
        num_split=packed.num_split,
        efficiency=sum(map(len, rows)) / (len(rows) * seq_len),
    )
