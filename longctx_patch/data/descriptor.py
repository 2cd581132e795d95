"""Describes a shard: of which row it is, and whose tokens of it.

The collator puts it into the batch and the patched model reads it there, so that a shard that was
cut for another rank or another layout is refused: its numbers could be wrong without an error.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from longctx_patch.data.rows import Row
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, LayoutName
from longctx_patch.sequence.placement import place

SHARD_KEY = "longctx_shard"
"""Key of an int64 tensor `[B, 7 + n]`: the fields of `Cut`, the length of the padded row, a
checksum of the whole row, its largest token, and the lengths of its documents, filled up with
zeros; where some go on from others, then -2 - parent for each of them."""
_LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)


class Cut(NamedTuple):
    """Says which of a row's tokens a shard has: those of one rank in one placement."""

    group_rank: int
    ulysses: int
    ring: int
    layout: int
    """Index among the names of layouts."""

    @classmethod
    def of(cls, group_rank: int, ulysses: int, ring: int, name: LayoutName) -> "Cut":
        return cls(group_rank, ulysses, ring, _LAYOUTS.index(name))

    def __str__(self) -> str:
        return (
            f"rank {self.group_rank} of ulysses_degree={self.ulysses} x ring_degree={self.ring}, "
            f"layout {_LAYOUTS[self.layout]!r}"
        )

    def is_same_as(self, other: "Cut", documents: Documents) -> bool:
        """Says whether both give a rank the same tokens: layouts of two names may."""
        return self == other or self._tokens(documents) == other._tokens(documents)

    @property
    def is_possible(self) -> bool:
        """Says whether a collator may have written it."""
        return 0 <= self.group_rank < self.ulysses * self.ring and self.layout in range(
            len(_LAYOUTS)
        )

    def _tokens(self, documents: Documents) -> object:
        name = _LAYOUTS[self.layout]
        layout: Layout = place(name, documents, ring=self.ring, ulysses=self.ulysses)
        return layout.intervals[self.group_rank]


_FIRST_LENGTH = len(Cut._fields) + 3


@dataclass(frozen=True)
class Descriptor:
    """The tensor under `SHARD_KEY`, read."""

    cut: Cut
    """Whose tokens of the row the shard has."""
    documents: Documents
    """The documents of the padded row (every row of the batch has the same)."""
    real_lengths: tuple[int, ...]
    """Tokens of each row of the batch without its padding."""
    longest: int
    """Tokens of the longest document of all rows."""
    most_id: int
    """The largest token of all rows, padding included."""
    checksum: int
    """Sums what all ranks of a group have alike: everything but whose tokens they have."""
    key: bytes
    """Equal for batches of equal rows."""

    @classmethod
    def read(cls, shard: Tensor) -> "Descriptor":
        """Raises ValueError for a tensor that no collator of this version has made, and for rows of
        which each has documents, and so a mask, of its own."""
        shard = shard.cpu()
        rows = shard.tolist() if shard.ndim == 2 and shard.shape[1] >= _FIRST_LENGTH else []
        cuts = {Cut(*row[: len(Cut._fields)]) for row in rows}
        padded = {row[len(Cut._fields)] for row in rows}
        if len(cuts) != 1 or len(padded) != 1 or not next(iter(cuts)).is_possible:
            raise ValueError(
                f"{SHARD_KEY} {list(shard.shape)} describes no shard: pass the batch of "
                "SequenceShardCollator unchanged. Batches of two calls can't be joined: give all "
                "rows to one call."
            )
        lengths = [tuple(length for length in row[_FIRST_LENGTH:] if length > 0) for row in rows]
        if len(lengths) > 1 and any(len(row) > 1 for row in lengths):
            raise ValueError(
                f"a batch of {len(lengths)} packed rows: rows with documents of their own have "
                "masks of their own. Give all rows to one call of SequenceShardCollator, which "
                "joins them, instead of joining its batches."
            )
        parents = tuple(-2 - number for number in rows[0][_FIRST_LENGTH:] if number < 0)
        return cls(
            cuts.pop(),
            Documents.of_row(lengths[0], padded.pop(), parents),
            tuple(map(sum, lengths)),
            longest=max(Documents(row, sum(row), parents).longest for row in lengths),
            most_id=max(row[_FIRST_LENGTH - 1] for row in rows),
            checksum=zlib.crc32(repr([row[len(Cut._fields) :] for row in rows]).encode()),
            key=shard.numpy().tobytes(),
        )

    @property
    def has_padding(self) -> bool:
        return any(length < self.documents.num_tokens for length in self.real_lengths)


def describe(
    rows: Sequence[Row], cut: Cut, length: int, input_ids: Tensor, labels: Tensor
) -> Tensor:
    """The tensor under `SHARD_KEY` of rows padded to `length`, `[B, length]` each."""
    most = max(len(row.lengths) for row in rows)
    said = [
        [*cut, length, _checksum(ids, row), int(ids.max())]
        for ids, row in zip(input_ids, labels, strict=True)
    ]
    filled = [
        [*row.lengths, *[0] * (most - len(row.lengths)), *(-2 - parent for parent in row.parents)]
        for row in rows
    ]
    return torch.tensor([[*start, *lengths] for start, lengths in zip(said, filled, strict=True)])


def _checksum(ids: Tensor, labels: Tensor) -> int:
    return zlib.crc32(ids.numpy().tobytes() + labels.numpy().tobytes())
