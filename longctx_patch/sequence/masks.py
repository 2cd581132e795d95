"""Who sees whom: masks as regions of the attention matrix that don't overlap.

Causal, window, documents, prefix, bidirectional and block-sparse masks are constructors, and
`a & b` allows what both allow.
"""

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import (
    CAUSAL,
    FULL,
    Band,
    Piece,
    Tile,
    intersect,
    last_ahead,
    numbers_of,
    trim_band,
    trim_tile,
)


@dataclass(frozen=True)
class Mask:
    """Who sees whom among `num_tokens` tokens: regions that don't overlap."""

    num_tokens: int
    regions: tuple[Piece, ...]
    name: str = field(default="mask", compare=False)
    """What reports call the mask."""

    def __post_init__(self) -> None:
        edges = [(*piece.q[:2], *piece.kv[:2]) for piece in self.regions]
        table = np.array(edges, dtype=np.int64).reshape(-1, 4)
        inside = bool((table >= 0).all() and (table <= self.num_tokens).all())
        if not inside or edges != sorted(edges, key=lambda edge: edge[0]):
            raise ValueError(
                f"regions of a mask over {self.num_tokens} tokens lie inside it, in order of "
                "their queries. Make it with mask_of(num_tokens, regions)."
            )

    @cached_property
    def is_causal(self) -> bool:
        """Says whether every token sees itself and all before it, and nothing else."""
        everything = Interval(0, self.num_tokens)
        if self.num_tokens < 2:
            return self.area == self.num_tokens
        return self.regions == (Piece(everything, everything, CAUSAL),)

    @cached_property
    def sees_ahead(self) -> bool:
        """Says whether some token sees a later one."""
        return any(last_ahead(piece) > 0 for piece in self.regions)

    @cached_property
    def has_tiles(self) -> bool:
        return any(isinstance(piece.rule, Tile) for piece in self.regions)

    @cached_property
    def area(self) -> int:
        """Number of allowed pairs."""
        return sum(piece.area for piece in self.regions)

    def has_region(self, piece: Piece) -> bool:
        """Says whether a piece, in tokens, is exactly one of the regions."""
        return piece in self._region_set

    @cached_property
    def _region_set(self) -> frozenset[Piece]:
        return frozenset(self.regions)

    def overlapping(self, q: Interval) -> Sequence[Piece]:
        """The regions that may have some of these rows."""
        first = bisect_left(self._last_stops, q.start + 1)
        return self.regions[first : self._first_region_from(q.stop)]

    def pieces(self, q: Interval, kv: Interval) -> list[Piece]:
        """The allowed pairs of two intervals of tokens; rows and columns count their members."""
        found = []
        for region in self.overlapping(q):
            rows, columns = q.members_in(region.q), kv.members_in(region.kv)
            if rows.size and columns.size:
                part = region.at(q.part(rows), kv.part(columns))
                if part is not None:
                    found.append(part.moved(rows.start, columns.start))
        return found

    def area_in(self, q: Interval, kv: Interval, piece: Piece) -> int:
        """Counts the allowed pairs of a piece; its rows and columns are members of `q` and `kv`."""
        found = (intersect(part, piece) for part in self.pieces(q, kv))
        return sum(part.area for part in found if part is not None)

    def dense(self) -> NDArray[np.bool_]:
        """The whole table, `[num_tokens, num_tokens]`: rows are queries."""
        table = np.zeros((self.num_tokens, self.num_tokens), dtype=np.bool_)
        for q, kv, rule in self.regions:
            table[q.start : q.stop, kv.start : kv.stop] |= Piece(q, kv, rule).bits()
        return table

    def __and__(self, other: "Mask") -> "Mask":
        if self.num_tokens != other.num_tokens:
            raise ValueError(
                f"masks over {self.num_tokens} and {other.num_tokens} tokens: both must be made "
                "for the padded length of the row."
            )
        found = (
            intersect(mine, theirs) for mine in self.regions for theirs in other.overlapping(mine.q)
        )
        return mask_of(
            self.num_tokens, [piece for piece in found if piece], f"{self.name} & {other.name}"
        )

    @cached_property
    def checksum(self) -> int:
        """A number that is equal in every process for equal masks, for ranks to compare."""
        numbers = np.array([numbers_of(piece) for piece in self.regions], dtype=np.int64)
        tables = b"".join(p.rule.bits.tobytes() for p in self.regions if isinstance(p.rule, Tile))
        return zlib.crc32(numbers.tobytes() + tables, self.num_tokens & 0xFFFFFFFF)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_tokens, self.regions))

    def _first_region_from(self, token: int) -> int:
        return bisect_left(self._starts, token)

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.q.start for piece in self.regions]

    @cached_property
    def _last_stops(self) -> list[int]:
        """The largest row stop of each region and of all regions before it."""
        stops = np.array([piece.q.stop for piece in self.regions], dtype=np.int64)
        return np.maximum.accumulate(stops).tolist() if len(stops) else []


def mask_of(num_tokens: int, regions: Iterable[Piece], name: str = "mask") -> Mask:
    """A mask of these regions, given in any order."""
    return Mask(num_tokens, tuple(sorted(regions, key=lambda piece: (piece.q, piece.kv))), name)


def causal(num_tokens: int) -> Mask:
    """A token sees itself and everything before it."""
    return documents_mask(Documents.one(num_tokens))


def bidirectional(num_tokens: int) -> Mask:
    """Every token sees every token."""
    return documents_mask(Documents.one(num_tokens), is_causal=False)


def window_band(window: int | None) -> Band:
    """The last `window` keys, the token itself included, as transformers counts them."""
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(
            f"window={window!r}: a whole number of keys, the token itself included. Use 1 or more, "
            "or None."
        )
    return CAUSAL if window is None else Band(1 - window, 0)


def documents_mask(
    documents: Documents, *, window: int | None = None, is_causal: bool = True
) -> Mask:
    """Tokens see their own document: causally, the last `window` keys of it, or all of it."""
    band = window_band(window) if is_causal else FULL
    if not is_causal and window is not None:
        raise ValueError(f"window={window} with is_causal=False: a window looks back. Drop one.")
    name = "causal" if is_causal else "bidirectional"
    if window is not None:
        name = f"window {window}"
    if not documents.is_one:
        name += f", {len(documents.lengths)} documents"
    if documents.has_branches:
        name += " with branches"
    return Mask(documents.num_tokens, _in_each(documents, band), name)


def within(documents: Documents, window: int | None) -> Mask:
    """Everything inside documents; with a window only the last `window` keys and all later ones."""
    low = None if window is None else window_band(window).low
    regions = _in_each(documents, Band(low, None))
    return Mask(documents.num_tokens, regions, f"{len(regions)} documents")


def _in_each(documents: Documents, band: Band) -> tuple[Piece, ...]:
    """The square of each document, cut to a band, and a rectangle for each that it goes on from.

    Bands count positions, so that of a rectangle is shifted by how much later its queries begin."""
    edges, begins, lengths = documents.edges, documents.begins, documents.lengths

    @cache
    def trimmed(rows: int, columns: int, ahead: int) -> Piece | None:
        return trim_band(rows, columns, band.shift(ahead))

    pairs = ((q, kv) for q in range(len(lengths)) for kv in documents.path(q))
    return tuple(
        piece.moved(edges[q], edges[kv])
        for q, kv in pairs
        if (piece := trimmed(lengths[q], lengths[kv], begins[q] - begins[kv]))
    )


def prefix_lm(num_tokens: int, prefix: int) -> Mask:
    """The first `prefix` tokens see each other; the others see those and what is before them."""
    if not 0 <= prefix <= num_tokens:
        raise ValueError(f"prefix={prefix} of {num_tokens} tokens: use 0 to {num_tokens}.")
    everything, head = Interval(0, num_tokens), Interval(0, prefix)
    rest = Interval(prefix, num_tokens)
    regions = [Piece(everything, head, FULL), Piece(rest, rest, CAUSAL)]
    return mask_of(num_tokens, [p for p in regions if p.area], f"prefix {prefix}")


def block_sparse(
    num_tokens: int, blocks: NDArray[np.bool_], block_size: int, *, is_causal: bool = True
) -> Mask:
    """Block-sparse attention (FlashAttention, section 3.3): `blocks[i, j]` allows a square.

    Args:
        blocks: boolean `[n, n]` with n = ceil(num_tokens / block_size); rows are queries.
        block_size: tokens of a block; the last one may be shorter.
        is_causal: keep only keys up to the query.
    """
    blocks = np.asarray(blocks, dtype=np.bool_)
    count = -(-num_tokens // max(1, block_size))
    if block_size < 1 or blocks.shape != (count, count):
        raise ValueError(
            f"blocks {list(blocks.shape)} of {block_size} tokens for {num_tokens} tokens: it must "
            f"be [{count}, {count}], a bit for each pair of blocks."
        )
    regions = []
    for row, columns in enumerate(blocks):
        q = Interval(row * block_size, min((row + 1) * block_size, num_tokens))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], columns, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():
            kv = Interval(first * block_size, min(last * block_size, num_tokens))
            band = CAUSAL.shift(q.start - kv.start) if is_causal else FULL
            piece = trim_band(q.size, kv.size, band)
            if piece is not None:
                regions.append(piece.moved(q.start, kv.start))
    return mask_of(num_tokens, regions, f"block-sparse {block_size}")


def function_mask(
    num_tokens: int,
    allowed: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
    *,
    block_size: int = 128,
) -> Mask:
    """Whatever a function of (query token, key token) allows; empty blocks cost nothing.

    `allowed` is called with broadcastable arrays `[b, 1]` and `[1, m]` and returns `[b, m]`. Every
    pair is evaluated, so use `block_sparse` for long sequences where it can express the mask.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: blocks have one token or more.")
    regions: list[Piece] = []
    keys = np.arange(num_tokens)[None, :]
    for start in range(0, num_tokens, block_size):
        rows = np.arange(start, min(start + block_size, num_tokens))[:, None]
        table = np.broadcast_to(allowed(rows, keys), (len(rows), num_tokens)).astype(np.bool_)
        regions += _regions_of_rows(table, start, block_size)
    return mask_of(num_tokens, regions, "function")


def _regions_of_rows(table: NDArray[np.bool_], first_row: int, block_size: int) -> Iterable[Piece]:
    """Runs of full blocks become one region, every other block that is not empty another."""
    full_from: int | None = None
    num_rows, num_tokens = table.shape
    for start in range(0, num_tokens + 1, block_size):
        block = table[:, start : start + block_size]
        is_full = bool(block.size and block.all())
        if is_full and full_from is None:
            full_from = start
        if not is_full and full_from is not None:
            q = Interval(first_row, first_row + num_rows)
            yield Piece(q, Interval(full_from, min(start, num_tokens)), FULL)
            full_from = None
        if not is_full and (part := trim_tile(block)) is not None:
            yield part.moved(first_row, start)
    if full_from is not None:
        q = Interval(first_row, first_row + num_rows)
        yield Piece(q, Interval(full_from, num_tokens), FULL)
