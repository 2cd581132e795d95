"""Make kernel calls from the pieces of a mask.

Parts with the same rule share a call where their rows are disjoint: as the segments of one packed
call or, for kernels that take one segment, as rows of its batch where they are equally large.
"""

from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from longctx_patch.kernels.base import Segments, Traits, Window
from longctx_patch.kernels.lowering import Part, parts_of
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import Piece, Tile


class Call(NamedTuple):
    """One kernel call: the rows `q[n]` attend to the columns `kv[n]`, for each segment n.

    Rows are in order and in one segment each; columns may be in several.
    """

    q: tuple[Interval, ...]
    kv: tuple[Interval, ...]
    segments: Segments
    flipped: bool = False
    """The kernel gets all rows in reverse order, which makes an anticausal square a causal one."""


def calls_of(pieces: tuple[Piece, ...], traits: Traits) -> tuple[Call, ...]:
    """The calls that a kernel with these traits needs for disjoint pieces.

    The time is linear in the number of parts, apart from sorting them.
    """
    parts = [part for piece in pieces for part in parts_of(piece, traits)]
    if traits.segments and traits.windows:
        parts = _widened(parts)
    kinds: dict[Hashable, list[Part]] = {}
    for part in parts:
        kinds.setdefault(_kind(part, traits), []).append(part)
    return tuple(_call(chain) for alike in kinds.values() for chain in _chains(alike))


def must_be_equal(rule: Window | Tile, traits: Traits) -> bool:
    """Says whether the segments of a call must be equally large, and become rows of the batch."""
    return isinstance(rule, Tile) or not traits.segments


def _kind(part: Part, traits: Traits) -> Hashable:
    """Parts of one kind can share a call."""
    if must_be_equal(part.rule, traits):
        return (part.rule, part.flipped, part.q.size, part.kv.size)
    return (part.rule, part.flipped)


def _widened(parts: list[Part]) -> list[Part]:
    """Give parts in which a bound can't bind the bounds of other parts, to share a call with them.

    Under a sliding window these are documents shorter than the window, or of one token. In a
    segment of n rows and m columns, `1 - m <= j - (i + m - n) <= n - 1` for every pair, so wider
    bounds don't bind.
    """
    lefts: dict[int | None, int | None] = {}
    for _, _, rule, _ in parts:
        if isinstance(rule, Window):
            known = lefts.get(rule.right)
            lefts[rule.right] = known if rule.left is None else max(rule.left, known or 0)
    return [_with_bounds_of(part, lefts) for part in parts] if len(parts) > 1 else parts


def _with_bounds_of(part: Part, lefts: dict[int | None, int | None]) -> Part:
    """`lefts`: for each right bound the largest left one, or None where there is none."""
    rule = part.rule
    if isinstance(rule, Tile) or part.q.size > part.kv.size:  # a window needs n <= m
        return part
    right = 0 if rule.right is None and part.q.size == 1 and 0 in lefts else rule.right
    left = lefts[right] if rule.left is None else rule.left
    if left is not None and left < part.kv.size - 1 and rule.left is None:
        left = None
    return part._replace(rule=Window(left, right))


def _chains(parts: Iterable[Part]) -> list[list[Part]]:
    """The fewest lists whose rows are disjoint: each part joins the list that ended first."""
    chains: list[list[Part]] = []
    ends: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: (part.q, part.kv)):
        if ends and ends[0][0] <= part.q.start:
            _, number = heappop(ends)
            chains[number].append(part)
        else:
            number = len(chains)
            chains.append([part])
        heappush(ends, (part.q.stop, number))
    return chains


def _call(parts: list[Part]) -> Call:
    q, kv = tuple(part.q for part in parts), tuple(part.kv for part in parts)
    sizes = tuple(i.size for i in q), tuple(i.size for i in kv)
    return Call(q, kv, Segments(*sizes, parts[0].rule), parts[0].flipped)
