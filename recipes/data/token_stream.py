"""The tokens of tables of text, as one stream that stays on disk, and where its documents are."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.token_table import lengths_of


class TokenStream:
    """The tokens of all documents of some tables (of `TextReading`), one after another.

    It holds the place of each chunk of the tables, and none of their tokens.
    """

    def __init__(self, tables: Sequence[Any], losses: Losses | None = None) -> None:
        """`losses`: what of the records is in no table."""
        self._tables, self.losses = tables, losses or Losses()
        chunks = [table.data.column("input_ids").chunks for table in tables]
        self._chunks = [chunk for of_table in chunks for chunk in of_table]
        sizes = [_last(chunk) - _first(chunk) for chunk in self._chunks]
        self._edges = np.cumsum([0, *sizes])

    @classmethod
    def joined(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        """The documents of all streams, one stream after another."""
        losses = Losses.joined(stream.losses for stream in streams)
        return cls([table for stream in streams for table in stream._tables], losses)

    def __len__(self) -> int:
        return int(self._edges[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """int32 tokens from `start` to before `stop`, copied from disk."""
        number = int(np.searchsorted(self._edges, start, side="right")) - 1
        found = []
        while start < stop:
            chunk, before = self._chunks[number], int(self._edges[number])
            end = min(stop, int(self._edges[number + 1]))
            inside = slice(start - before, end - before)
            found.append(chunk.flatten()[inside].to_numpy())
            start, number = end, number + 1
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def document_lengths(self) -> np.ndarray:
        """int64 tokens of each document, its eos included."""
        edges, before = [np.zeros(1, np.int64)], 0
        for table in self._tables:
            stops = np.cumsum(lengths_of(table)) + before
            edges.append(stops[_column(table, "ends")])
            before = int(stops[-1])
        return np.diff(np.concatenate(edges))

    def digest(self) -> bytes:
        """Equal for equal documents, wherever they are stored; made from those of the rows."""
        content = hashlib.sha256()
        for name in ("digest", "ends"):
            for table in self._tables:
                content.update(_column(table, name).tobytes())
        return content.digest()


def _column(table: Any, name: str) -> np.ndarray:
    chunks = table.data.column(name).chunks
    return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks])


def _first(chunk: Any) -> int:
    return int(chunk.offsets[0].as_py())


def _last(chunk: Any) -> int:
    return int(chunk.offsets[-1].as_py())
