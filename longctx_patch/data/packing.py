"""Packing of documents into rows of a given length, with as little padding as possible.

`pack_rows` goes once over tokenised rows and yields packed ones for `SequenceShardCollator`, which
keeps attention, positions and labels within documents. `pack_lengths` says which documents these
rows have, from their lengths alone. `best_fit` is the packing algorithm.

Packing is deterministic: ranks that are given the same rows in the same order pack them alike.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, get_args

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from longctx_patch.data.rows import Row, join_rows, parse_row

TooLong = Literal["refuse", "split"]
T = TypeVar("T")


class PackedRow(TypedDict):
    """Documents one after another, without padding."""

    input_ids: Tensor
    """int64 `[tokens]`, at most `seq_len` of them."""
    labels: Tensor
    """int64 `[tokens]`, unshifted: the collator shifts labels within each document."""
    seq_lengths: list[int]
    """Length of each document, as TRL names it."""
    seq_parents: NotRequired[list[int]]
    """Where there are branches: the document that each one goes on from, or -1."""


def pack_rows(
    rows: Iterable[Mapping[str, Any]],
    seq_len: int,
    *,
    buffer_rows: int = 32,
    too_long: TooLong = "refuse",
) -> "PackedRows":
    """Pack rows, best fit first, while they stream by.

    Args:
        rows: mappings as the collator takes them (`input_ids`, optional `labels`, an optional
            `attention_mask` that marks padding on the right, which is dropped), of one document
            each, of the documents whose lengths `seq_lengths` gives, or of a prompt and its
            `branches`, which stay in one packed row. They come as a list, a dataset, or, for one
            pass, an iterator, and are the same on every rank of a sequence group.
        seq_len: most tokens of a packed row. Give it to the collator as `pad_to_length` where all
            batches should have one length.
        buffer_rows: how many packed rows' worth of documents to choose from. A larger buffer packs
            tighter, needs more memory, and moves documents further from their place in the stream.
        too_long: what to do with a document longer than `seq_len`: an error, or split it into
            documents of `seq_len` tokens. Attention does not cross such a cut, and the first token
            after it is no token's label. Branches with their prompt are not split.

    Raises ValueError for bad arguments at once, and for bad rows when iteration reaches them.

    Example:
        >>> packed = pack_rows([{"input_ids": [1] * n} for n in (3, 4, 5)], seq_len=8)
        >>> [row["seq_lengths"] for row in packed], packed.efficiency
        ([[3, 5], [4]], 0.75)
    """
    for name, value in (("seq_len", seq_len), ("buffer_rows", buffer_rows)):
        if value < 1:
            raise ValueError(f"{name}={value}: it counts from 1. Give 1 or more.")
    if too_long not in get_args(TooLong):
        raise ValueError(f"too_long={too_long!r}: use one of {', '.join(get_args(TooLong))}.")
    return PackedRows(rows, seq_len, buffer_rows, too_long)


class PackedRows(IterableDataset[PackedRow]):
    """Packed rows, made while they are iterated over; `pack_rows` creates this data set.

    The counts are those of the latest pass, up to its current row.

    In a `DataLoader` use `num_workers` 0 or 1: each worker would pack all rows, so several are
    refused. One worker packs during the training step; the counts then stay in that worker.
    """

    num_rows: int
    """Packed rows so far."""
    num_tokens: int
    """Tokens in them."""
    num_documents: int
    """Documents in them; each piece of a split document counts."""
    num_split: int
    """Documents that were longer than a row and have been split."""
    num_empty: int
    """Documents without a token, which are dropped."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        seq_len: int,
        buffer_rows: int,
        too_long: TooLong,
    ) -> None:
        self.rows = rows
        self.seq_len = seq_len
        self.buffer_rows = buffer_rows
        self.too_long = too_long
        self._begun = False
        self._reset_counts()

    @property
    def efficiency(self) -> float:
        """Share of real tokens in the packed rows so far, each counted as `seq_len` long."""
        if self.num_rows == 0:
            raise ValueError(
                "efficiency of 0 rows: it is known once rows are packed, in the process that packs "
                "them. Iterate first, under a DataLoader with num_workers=0."
            )
        return self.num_tokens / (self.num_rows * self.seq_len)

    def __iter__(self) -> Iterator[PackedRow]:
        self._check_pass()
        self._begun = True
        self._reset_counts()
        for documents in self._bins():
            self.num_rows += 1
            row = join_rows(documents)
            self.num_tokens += len(row.ids)
            self.num_documents += len(row.lengths)
            packed = PackedRow(input_ids=row.ids, labels=row.labels, seq_lengths=list(row.lengths))
            if row.parents:
                packed["seq_parents"] = list(row.parents)
            yield packed

    def _reset_counts(self) -> None:
        self.num_rows = self.num_tokens = self.num_documents = 0
        self.num_split = self.num_empty = 0

    def _check_pass(self) -> None:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers}: each worker would pack all rows, and they "
                "would come several times. Use num_workers=0 or 1."
            )
        if self._begun and isinstance(self.rows, Iterator):
            raise ValueError(
                f"a second pass over rows of type {type(self.rows).__name__}, which can be read "
                "once. Give a list or a dataset."
            )

    def _bins(self) -> Iterator[list[Row]]:
        """The documents of each packed row; a prompt and its branches count as one."""
        documents = ((len(document.ids), document) for document in self._documents())
        return _filled(documents, self.seq_len, self.buffer_rows)

    def _documents(self) -> Iterator[Row]:
        """The documents of all rows, none empty and none longer than a packed row."""
        for number, given in enumerate(self.rows):
            row = parse_row(given, number)
            if not row.lengths:
                self.num_empty += 1
            for document in [row] if row.parents else _cut(row, row.lengths):
                yield from self._split_if_long(document, number)

    def _split_if_long(self, document: Row, number: int) -> Iterator[Row]:
        length = len(document.ids)
        if length <= self.seq_len:
            yield document
            return
        if document.parents:
            raise ValueError(
                f"row {number} has {length} tokens with its branches, and a packed row has "
                f"seq_len={self.seq_len} at most. Give a larger seq_len, or fewer branches."
            )
        if self.too_long == "refuse":
            raise ValueError(
                f"row {number} has a document of {length} tokens, and a packed row has "
                f"seq_len={self.seq_len} at most. Give a larger seq_len, or too_long='split', "
                "which splits it into documents of that length."
            )
        self.num_split += 1
        whole, rest = divmod(length, self.seq_len)
        yield from _cut(document, [self.seq_len] * whole + [rest] * (rest > 0))


def pack_lengths(
    lengths: Iterable[int], seq_len: int, *, buffer_rows: int = 32
) -> Iterator[list[int]]:
    """The numbers (from 0) of the documents in each row that `pack_rows` makes of documents with
    these lengths, each from 1 to `seq_len`."""
    return _filled(
        ((length, number) for number, length in enumerate(lengths)), seq_len, buffer_rows
    )


def _filled(items: Iterable[tuple[int, T]], seq_len: int, buffer_rows: int) -> Iterator[list[T]]:
    """Items, given with their lengths, in the order of packed rows.

    When the buffer is full, all bins are yielded except the emptiest, whose items stay in the
    buffer.
    """
    buffer: list[tuple[int, T]] = []
    num_buffered = 0
    for item in items:
        buffer.append(item)
        num_buffered += item[0]
        if num_buffered >= buffer_rows * seq_len:
            *full, buffer = _packed(buffer, seq_len)
            yield from ([found for _, found in row] for row in full)
            num_buffered = sum(length for length, _ in buffer)
    if buffer:
        yield from ([found for _, found in row] for row in _packed(buffer, seq_len))


def _packed(items: Sequence[tuple[int, T]], seq_len: int) -> list[list[tuple[int, T]]]:
    """Bins in the order of the stream, except that the emptiest comes last."""
    lengths = [length for length, _ in items]
    bins = list(best_fit(lengths, seq_len))
    emptiest = min(range(len(bins)), key=lambda n: sum(lengths[i] for i in bins[n]))
    bins.append(bins.pop(emptiest))
    return [[items[index] for index in indices] for indices in bins]


def _cut(row: Row, lengths: Sequence[int]) -> Iterator[Row]:
    parts = (part.split(list(lengths)) for part in row[:2])
    yield from (Row(ids, labels, (len(ids),)) for ids, labels in zip(*parts, strict=True))


def best_fit(lengths: Sequence[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Bins of at most `capacity`: each length, longest first, goes where it leaves least room.

    Best-fit decreasing (Johnson et al. 1974), which needs at most 11/9 of the fewest bins, plus a
    few. Finding a bin takes the logarithm of the number of distinct rooms (what bins have left), so
    millions of lengths are fine.

    Returns:
        The indices of the lengths in each bin, ascending; bins in the order of their first index.

    Raises:
        ValueError: a length is below 1 or above `capacity`.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"length {length} at index {index}: bins have a capacity of {capacity}, so lengths "
                f"lie in 1..{capacity}. Drop what is empty; split what is longer."
            )
    bins: list[list[int]] = []
    bins_with: dict[int, list[int]] = {}  # by room: the bins that have exactly this much left
    rooms: list[int] = []  # keys of `bins_with`, ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = bins_with[room].pop()
            if not bins_with[room]:
                del bins_with[room], rooms[place]
        bins[chosen].append(index)
        left = room - lengths[index]
        if left not in bins_with:
            bins_with[left] = []
            insort(rooms, left)
        bins_with[left].append(chosen)
    return tuple(sorted(tuple(sorted(indices)) for indices in bins))
