"""Rows of a run on plain text, cut or packed of documents whose tokens stay on disk.

Everything here is a pure function of the files and the settings: every process computes the same
rows, but that of packed ones is found by one process of a machine. It holds where rows lie, 8 to 20
bytes for each document in them, and no tokens.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from longctx_patch.data import pack_lengths
from longctx_patch.recipes.data.losses import say_losses
from longctx_patch.recipes.data.sealed import shared_arrays
from longctx_patch.recipes.data.token_stream import TokenStream
from longctx_patch.recipes.row_order import Row

PACKING = 1
"""Goes up when the same documents are packed into other rows than before."""
NO_TEXT = "no text found: the sources of text hold only empty documents."


class Pieces(NamedTuple):
    """Parts of documents, or of the joined text, in order."""

    starts: np.ndarray
    """int64, places in the stream."""
    lengths: np.ndarray
    """int32 tokens."""

    def taken(self, which: np.ndarray) -> "Pieces":
        return Pieces(self.starts[which], self.lengths[which])


MANY_TIMES = 4
REPEATED = (
    f"what is read more than {MANY_TIMES} times teaches ever less, arXiv 2305.16264; give more of "
    "it, or a smaller share"
)


class Share(NamedTuple):
    """Says what a source, or a kind of documents, has of the tokens of a run."""

    source: str
    num_tokens: int
    of_all: float
    num_rows: int
    times: float
    """How often its rows are there, on average."""

    @property
    def tokens(self) -> str:
        """Says what follows its share, in words."""
        said = f"of the tokens, {self.num_tokens:,}; rows {self.times:.2f} times each of its"
        said = f"{said} {self.num_rows:,}"
        return said if self.times <= MANY_TIMES else f"{said} (WARNING: {REPEATED})"

    def __str__(self) -> str:
        return f"{self.source}: {self.of_all:.1%} {self.tokens}"


@dataclass(frozen=True)
class TextRows(Sequence[Row]):
    """Rows of tokens, read from disk one by one."""

    stream: TokenStream
    seq_len: int
    pieces: Pieces
    edges: np.ndarray | None = None
    """Packed row n has the pieces `edges[n]` to before `edges[n + 1]`; None: row n is piece n."""
    summary: str = ""
    """How rows were packed."""
    shares: tuple[Share, ...] = ()
    """What each source has where rows were drawn by shares."""
    num_left_out: int = 0
    """Tokens of the stream that fill no row."""

    def __len__(self) -> int:
        return len(self.pieces.starts if self.edges is None else self.edges[1:])

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.edges is None:
            return {"input_ids": self._tokens(index).tolist()}
        which = range(self.edges[index], self.edges[index + 1])
        ids = np.concatenate([self._tokens(piece) for piece in which])
        lengths = self.pieces.lengths[which.start : which.stop]
        return {"input_ids": ids.tolist(), "seq_lengths": lengths.tolist()}

    def say_losses(self, name: str, *, allowed: bool, say: Callable[[str], object]) -> None:
        """Print what of the text is in no row, by its `name`. Raises ValueError if that is many
        records."""
        say_losses(self.stream.losses, name, allowed=allowed, say=say)
        for what, number, text in self.left_out:
            say(f"{name}: {what} {number} {text}")

    @property
    def left_out(self) -> list[tuple[str, str, str]]:
        """(what happens, how many, of what and why) with tokens in no row."""
        number = f"{self.num_left_out:,}"
        return [("left out", number, "tokens, which fill no row")] if self.num_left_out else []

    def pieces_by_row(self) -> np.ndarray:
        """int64, how many pieces each row has."""
        return np.ones(len(self), np.int64) if self.edges is None else np.diff(self.edges)

    def _tokens(self, piece: int) -> np.ndarray:
        start = int(self.pieces.starts[piece])
        return self.stream.read(start, start + int(self.pieces.lengths[piece]))

    @property
    def num_tokens(self) -> int:
        return int(self.pieces.lengths.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """Share of real tokens in the rows, each counted as `seq_len` long."""
        return self.num_tokens / (len(self) * self.seq_len)

    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        if self.edges is None:
            return self.pieces.lengths
        return np.add.reduceat(self.pieces.lengths, self.edges[:-1])

    def called(self, index: int) -> str:
        """A row by its number and those of its documents, both from 0, in words."""
        which = slice(index, index + 1)
        if self.edges is not None:
            which = slice(self.edges[index], self.edges[index + 1])
        ends = np.cumsum(self.stream.document_lengths())
        starts, lengths = (places[which].astype(np.int64) for places in self.pieces)
        first, last = (
            np.searchsorted(ends, at, side="right") for at in (starts, starts + lengths - 1)
        )
        numbers = [n for a, b in zip(first, last, strict=True) for n in range(a, b + 1)]
        word = "document" if len(numbers) == 1 else "documents"
        return f"row {index} ({word} {', '.join(map(str, numbers))})"

    def digest(self) -> str:
        """A short fingerprint, equal for equal tokens in equal rows and documents."""
        content = hashlib.sha256(self.stream.digest())
        for places in (*self.pieces, self.edges):
            if places is not None:
                content.update(places.tobytes())
        return content.hexdigest()[:16]


def joined_rows(stream: TokenStream, seq_len: int) -> TextRows:
    """Rows of exactly `seq_len` tokens, cut from the joined documents; the rest is dropped."""
    starts = np.arange(0, len(stream) - seq_len + 1, seq_len)
    lengths = np.full(len(starts), seq_len, np.int32)
    return _with_rows(_text_rows(stream, seq_len, Pieces(starts, lengths)))


def single_rows(stream: TokenStream, seq_len: int) -> TextRows:
    """Rows of tokens of one document: a longer one gives several, and the last row of each may be
    shorter (2 tokens at least)."""
    pieces = _cut(stream.document_lengths(), seq_len)
    return _with_rows(_text_rows(stream, seq_len, pieces.taken(pieces.lengths > 1)))


def _text_rows(stream: TokenStream, seq_len: int, pieces: Pieces) -> TextRows:
    """Rows that have each token of the stream once, or not at all."""
    left_out = len(stream) - int(pieces.lengths.sum(dtype=np.int64))
    return TextRows(stream, seq_len, pieces, num_left_out=left_out)


def _with_rows(rows: TextRows) -> TextRows:
    if not len(rows):
        raise ValueError(
            f"the text has {len(rows.stream)} tokens, less than one row of seq_len={rows.seq_len}. "
            "Give more text, a shorter --seq-len, or --pack or --one-document-per-row, which pad."
        )
    return rows


def packed_rows(stream: TokenStream, seq_len: int) -> TextRows:
    """Rows of `seq_len` tokens filled with documents, best fit first, which don't see each other.

    A document longer than a row is cut into documents of `seq_len` tokens and a rest. They don't
    see each other, and the first token after a cut is not predicted. A row in which nothing is
    predicted (a rest of one token that fitted into no other row) is left out.
    """
    documents = stream.document_lengths()
    found = _packed_rows(stream, _cut(documents, seq_len), seq_len)
    summary = (
        f"packed {len(documents):,} documents into {len(found):,} rows, "
        f"{found.efficiency:.1%} full; longer than a row, so split: "
        f"{int((documents > seq_len).sum()):,}"
    )
    return replace(found, summary=summary)


def rows_by_length(stream: TokenStream, seq_len: int, least: int) -> tuple[TextRows, TextRows]:
    """Packed rows of the documents, or pieces of them, that have `least` tokens or more, and packed
    rows of the shorter ones, the rests of long documents included.

    Raises ValueError without a document of either kind.
    """
    documents = stream.document_lengths()
    num_long, longest = int((documents >= least).sum()), int(documents.max())
    if num_long in (0, len(documents)):
        has, needs = (
            (f"the longest of {len(documents):,} documents has {longest:,} tokens", "longer")
            if num_long == 0
            else (f"all {len(documents):,} documents have as many", "shorter")
        )
        raise ValueError(
            f"mixture: a document is long from {least:,} tokens, and {has}. Give {needs} "
            "documents too, another limit (from=16K in --mixture), or no mixture."
        )
    pieces = _cut(documents, seq_len)
    is_long = pieces.lengths >= least
    long, short = (
        _packed_rows(stream, pieces.taken(which), seq_len, f"{name} from {least}")
        for name, which in (("long", is_long), ("short", ~is_long))
    )
    num_rests = int((~is_long).sum()) - (len(documents) - num_long)
    return (
        replace(long, summary=f"long ({num_long:,} documents of {least:,} tokens or more)"),
        replace(
            short,
            summary=f"short ({len(documents) - num_long:,} documents, {num_rests:,} "
            "rests of long ones)",
        ),
    )


def _packed_rows(stream: TokenStream, pieces: Pieces, seq_len: int, which: str = "") -> TextRows:
    """Packed rows of these pieces of the stream; `which` names them."""
    what = repr((PACKING, seq_len, *filter(None, [which]))).encode()
    key = hashlib.sha256(stream.digest() + what).hexdigest()[:32]
    made = shared_arrays(key, ("starts", "lengths", "edges"), lambda: _packed(pieces, seq_len))
    packed = Pieces(made["starts"], made["lengths"])
    left_out = int(pieces.lengths.sum(dtype=np.int64) - packed.lengths.sum(dtype=np.int64))
    return TextRows(stream, seq_len, packed, made["edges"], num_left_out=left_out)


def _packed(pieces: Pieces, seq_len: int) -> dict[str, np.ndarray]:
    """Returns where pieces of packed rows lie, in the rows' order, and the rows' edges in it."""
    order, edges = array("q"), array("q", [0])
    for row in pack_lengths(map(int, pieces.lengths), seq_len):
        if pieces.lengths[row].max() > 1:
            order.extend(row)
            edges.append(len(order))
    if len(edges) == 1:
        raise ValueError(NO_TEXT)
    return {**pieces.taken(np.array(order))._asdict(), "edges": np.array(edges)}


def _cut(documents: np.ndarray, seq_len: int) -> Pieces:
    """Documents of these lengths in pieces of `seq_len` tokens, the last of each a rest."""
    firsts = np.cumsum(documents) - documents
    counts = -(-documents // seq_len)
    lengths = np.full(int(counts.sum()), seq_len, np.int32)
    last = np.cumsum(counts) - 1
    lengths[last] = documents - (counts - 1) * seq_len
    within = np.arange(len(lengths)) - np.repeat(last + 1 - counts, counts)
    return Pieces(np.repeat(firsts, counts) + within * seq_len, lengths)
